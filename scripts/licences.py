#!/usr/bin/env python3
"""Checks that every dependency may be used: its licence expression must be satisfied by the licences below."""

import json
import os
import re
import subprocess
import sys

ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "NCSA",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}


def satisfied(expression):
    """True if the SPDX `expression` can be met with ALLOWED alone. ValueError if it cannot be read."""
    # "MIT/Apache-2.0" is the old way to write OR.
    tokens = re.findall(r"[()]|[A-Za-z0-9.+-]+", expression.replace("/", " OR "))
    position = 0

    def peek():
        return tokens[position] if position < len(tokens) else None

    def take():
        nonlocal position
        if position == len(tokens):
            raise ValueError("ends too early")
        position += 1
        return tokens[position - 1]

    def one():
        token = take()
        if token == "(":
            met = either()
            if take() != ")":
                raise ValueError("a parenthesis is missing")
            return met
        if token in (")", "AND", "OR", "WITH"):
            raise ValueError(f"{token} in the wrong place")
        if peek() == "WITH":
            take()
            token = f"{token} WITH {take()}"
        return token in ALLOWED

    def both():
        met = one()
        while peek() == "AND":
            take()
            met = one() and met
        return met

    def either():
        met = both()
        while peek() == "OR":
            take()
            met = both() or met
        return met

    met = either()
    if peek() is not None:
        raise ValueError(f"{peek()} in the wrong place")
    return met


def packages(manifest):
    """The packages that `manifest` depends on, from wherever, the workspace's own left out."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--manifest-path", manifest]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["packages"]
    return [package for package in found if package["source"] is not None]


def main():
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    manifests = [path for path in ("Cargo.toml", "fuzz/Cargo.toml") if os.path.exists(path)]
    seen, bad = {}, []
    for manifest in manifests:
        try:
            for package in packages(manifest):
                seen[package["name"], package["version"]] = package["license"]
        except subprocess.CalledProcessError as error:
            print(f"licences: cargo metadata for {manifest} failed with {error.returncode}", file=sys.stderr)
            return 1
    for (name, version), licence in sorted(seen.items()):
        try:
            if licence is None:
                bad.append(f"{name} {version}: names no licence")
            elif not satisfied(licence):
                bad.append(f"{name} {version}: {licence}")
        except ValueError as error:
            bad.append(f"{name} {version}: cannot read {licence!r}: {error}")
    for line in bad:
        print(f"licences: not allowed: {line}", file=sys.stderr)
    if bad:
        print("help: use another dependency, or add the licence to scripts/licences.py if it may be used", file=sys.stderr)
        return 1
    print(f"{len(seen)} dependencies, all under allowed licences")
    return 0


if __name__ == "__main__":
    sys.exit(main())
