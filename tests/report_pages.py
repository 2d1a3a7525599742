"""What a reader sees on a page of `amago report`, and what a browser gets from `amago watch`."""

import http.client
import json
import re
import threading
from contextlib import closing, contextmanager

from amago.report.page import WatchServer


def data_of(page):
    """What the page's script is given."""
    return json.loads(re.search(r"const data = (.*);\n", page.read_text())[1])


def figures_of(page):
    """The figures of a page, by title."""
    return {f["layout"]["title"]["text"]: f for f in data_of(page)["figures"]}


def shown(figure, axis="env_steps", statistic="mean"):
    """The traces that a reader sees for a choice."""
    return figure["variants"].get(f"{axis} {statistic}") or figure["variants"][""]


def lines(figure, **choice):
    """{name in the legend: (x, y)} of the lines, bands left out."""
    return {t["name"]: (t["x"], t["y"]) for t in shown(figure, **choice) if "name" in t}


def text_of(page):
    """What a reader sees, scripts left out."""
    return re.sub(r"<script>.*?</script>|<style>.*?</style>", "", page.read_text(), flags=re.S)


def cells_of(page, section, first):
    """{head: cell} of the row of a table that begins with a word."""
    part = re.search(rf'<section id="{section}">.*?</section>', page.read_text(), re.S)[0]
    for table in re.findall(r"<table>.*?</table>", part, re.S):
        heads = re.findall(r"<th>(.*?)</th>", table)
        for line in re.findall(r"<tr[^>]*>(.*?)</tr>", table):
            cells = re.findall(r"<td>(.*?)</td>", line)
            if cells[:1] == [first]:
                return dict(zip(heads, cells))
    raise AssertionError(f"no row {first!r} in {part}")


@contextmanager
def serving(*roots, token=None, host="127.0.0.1"):
    """A function that asks a server: (status, headers, text) of a path."""
    server = WatchServer((host, 0), roots, token)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def ask(path, method="GET", **headers):
        with closing(http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=250)) as connection:
            connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()

    ask.server = server
    ask.url = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        yield ask
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
