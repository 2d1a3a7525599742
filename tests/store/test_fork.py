"""A process that is forked goes on: with the files that its parent has open, and while another thread holds the lock of a store."""

import os
import threading
import time
import warnings

import pytest
from store_helpers import assert_numbered, opened, put

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork"), pytest.mark.timeout(60)]


def forked(work):
    """The exit code of a child, 7 where ``work`` has ended well; None: it had to be killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
        child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(7)
        finally:
            os._exit(1)
    for _ in range(300):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def test_a_child_and_its_parent_read_with_the_files_that_were_open_before(tmp_path):
    put(tmp_path, range(5))
    store = opened(tmp_path)
    store.read(0)

    def read():
        assert [assert_numbered(store.read(i)) for i in range(len(store))] == list(range(5))

    assert forked(read) == 7
    read()


def test_a_child_refreshes_while_a_thread_of_its_parent_did(tmp_path, monkeypatch):
    put(tmp_path, [1], "a")
    store, inside, go_on = opened(tmp_path), threading.Event(), threading.Event()
    monkeypatch.setattr(store, "evict", lambda evict=store.evict: (inside.set(), go_on.wait(), evict())[-1])
    thread = threading.Thread(target=store.refresh)
    thread.start()
    inside.wait()
    code = forked(store.info)
    go_on.set()
    thread.join()
    assert code == 7
