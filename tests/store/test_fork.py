"""A process that is forked while another thread holds the lock of a store goes on."""

import os
import threading
import warnings

import pytest
from store_helpers import opened, put


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
@pytest.mark.timeout(60)
def test_a_child_refreshes_while_a_thread_of_its_parent_did(tmp_path, monkeypatch):
    put(tmp_path, [1], "a")
    store, inside, go_on = opened(tmp_path), threading.Event(), threading.Event()
    monkeypatch.setattr(store, "evict", lambda evict=store.evict: (inside.set(), go_on.wait(), evict())[-1])
    thread = threading.Thread(target=store.refresh)
    thread.start()
    inside.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
        child = os.fork()
    if child == 0:
        store.info()
        os._exit(7)
    for _ in range(300):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        threading.Event().wait(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    go_on.set()
    thread.join()
    assert ended
    assert os.waitstatus_to_exitcode(status) == 7
