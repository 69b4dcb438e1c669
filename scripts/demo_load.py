#!/usr/bin/env python3
"""Fills a Redis and keeps a mixed load of GETs and SETs on it, over one connection that must never break.

demo_load.py --port PORT --mib MIB fill    write all keys once
demo_load.py --port PORT --mib MIB run     four GETs for each SET until SIGTERM, a line of figures every two seconds
"""

import argparse
import os
import random
import signal
import socket
import sys
import time

VALUE_BYTES = 4000
BATCH = 50
# Leaves processor time to the server: the speed of this script is not measured.
BATCHES_PER_SECOND = 200
# Values are cut from this at random places, so that pages of Redis differ and compress little.
NOISE = os.urandom(1 << 20)


def value():
    begin = random.randrange(len(NOISE) - VALUE_BYTES)
    return NOISE[begin : begin + VALUE_BYTES]


def command(*words):
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def check(answers, reader):
    """Reads `answers` answers; anything but a value or +OK ends the script."""
    for _ in range(answers):
        line = reader.readline()
        if line.startswith(b"$") and line != b"$-1\r\n":
            size = int(line[1:])
            if len(reader.read(size + 2)) != size + 2:
                sys.exit("load: the connection broke in an answer")
        elif line != b"+OK\r\n":
            sys.exit(f"load: unexpected answer {line!r}" if line else "load: the connection broke")


def key(number):
    return b"key:%08d" % number


def fill(connection, reader, keys):
    begin = time.monotonic()
    for first in range(0, keys, 1000):
        numbers = range(first, min(first + 1000, keys))
        connection.sendall(b"".join(command(b"SET", key(number), value()) for number in numbers))
        check(len(numbers), reader)
    print(f"{keys} keys of {VALUE_BYTES} bytes written in {time.monotonic() - begin:.1f} s", flush=True)


def run(connection, reader, keys):
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    begin = shown = time.monotonic()
    gets = sets = 0
    slowest = 0.0
    batches = 0
    while not stopped:
        words = [
            command(b"SET", key(random.randrange(keys)), value())
            if random.random() < 0.2
            else command(b"GET", key(random.randrange(keys)))
            for _ in range(BATCH)
        ]
        sets += sum(word.startswith(b"*3") for word in words)
        gets += sum(word.startswith(b"*2") for word in words)
        sent = time.monotonic()
        connection.sendall(b"".join(words))
        check(BATCH, reader)
        now = time.monotonic()
        slowest = max(slowest, now - sent)
        batches += 1
        if now - shown >= 2:
            rate = now - shown
            print(f"load: {gets / rate:6.0f} GET/s {sets / rate:6.0f} SET/s, slowest answer {slowest * 1000:5.1f} ms", flush=True)
            shown, gets, sets, slowest = now, 0, 0, 0.0
        ahead = begin + batches / BATCHES_PER_SECOND - now
        if ahead > 0:
            time.sleep(ahead)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("what", choices=["fill", "run"])
    arguments = parser.parse_args()
    # The memory that Redis uses for a key and its value.
    keys = arguments.mib * (1 << 20) // (VALUE_BYTES + 176)
    connection = socket.create_connection(("127.0.0.1", arguments.port))
    reader = connection.makefile("rb", buffering=1 << 16)
    (fill if arguments.what == "fill" else run)(connection, reader, keys)


main()
