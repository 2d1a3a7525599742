"""A link between two hosts, network namespaces, which delays each packet and loses some, by a pair of TUN devices. It exists for as long as
this process lives, which prints a line once it does.

Arguments: for each end the namespace, the device's name there, and its address with the length of the prefix; then the seconds of delay in
each direction, and the share of packets lost.
"""

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time

SET_INTERFACE, TUN, NO_HEADER = 0x400454CA, 0x0001, 0x1000


def end_of_link(host, device, address):
    """A file of which each read is a packet that the host has sent over the device, and each write one that it receives."""
    fd, name = os.open("/dev/net/tun", os.O_RDWR), f"tun{os.getpid()}{device}"[:15]
    fcntl.ioctl(fd, SET_INTERFACE, struct.pack("16sH", name.encode(), TUN | NO_HEADER))
    for words in (
        f"link set {name} netns {host} name {device}", f"-n {host} addr add {address} dev {device}", f"-n {host} link set {device} up",
    ):  # fmt: skip
        subprocess.run(["ip", *words.split()], check=True)
    return fd


def carry(one, other, delay, loss):
    there, draw, order, due = {one: other, other: one}, random.Random(0), itertools.count(), []
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        for fd in select.select([one, other], [], [], wait)[0]:
            packet = os.read(fd, 65536)
            if draw.random() >= loss:
                heapq.heappush(due, (time.monotonic() + delay, next(order), there[fd], packet))
        while due and due[0][0] <= time.monotonic():
            _, _, fd, packet = heapq.heappop(due)
            os.write(fd, packet)


if __name__ == "__main__":
    ends = [end_of_link(*sys.argv[first : first + 3]) for first in (1, 4)]
    print("up", flush=True)
    carry(*ends, *map(float, sys.argv[7:]))
