#!/usr/bin/env python3
"""Builds the book of the documents in `book`, by the mdBook that `scripts/suite setup book` installs, and checks that every
link in it that is not to another host leads to a file, and to an element where it names one. The exit status is 77 where there
is no mdBook.
"""

import html.parser
import os
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "book"


class Page(html.parser.HTMLParser):
    """The links and the names of elements in a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.names = set(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name == "id" or tag == "a" and name == "name":
                self.names.add(value)


def build():
    """Runs mdBook. It warns of what it leaves out and goes on, so that a warning is a failure here."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    mdbook = cache / "pagemark/mdbook/bin/mdbook"
    if not mdbook.exists():
        print(f"skipped: book: no mdBook in {mdbook.parent} (make book installs it)")
        sys.exit(77)
    shutil.rmtree(BOOK, ignore_errors=True)
    result = subprocess.run([mdbook, "build", ROOT], stderr=subprocess.PIPE, text=True)
    sys.stderr.write(result.stderr)
    if result.returncode != 0 or any(word in result.stderr for word in ("[WARN]", "[ERROR]")):
        sys.exit("book: mdBook failed")


def correct_links():
    """mdBook takes each link to a document for one to a page. Documents outside of the book are no pages, and the page of a
    README is the index of its directory."""
    for path in BOOK.rglob("*.html"):
        text = path.read_text()
        for link in Page(path).links:
            target = link.split("#")[0]
            file = Path(os.path.normpath(path.parent / target))
            if not target.endswith(".html") or "://" in target:
                continue
            new = link.replace("README.html", "index.html") if file.is_relative_to(BOOK) else link.replace(".html", ".md", 1)
            text = text.replace(f'href="{link}"', f'href="{new}"')
        path.write_text(text)


def faults():
    """The links that lead nowhere, and how many there are in all."""
    pages = {path: Page(path) for path in BOOK.rglob("*.html")}
    found, count = [], 0
    for path, page in pages.items():
        # The contents in a frame, and the page for what is not found, are for the root of a server.
        if path.name in ("404.html", "toc.html", "print.html"):
            continue
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            file = Path(os.path.normpath(path.parent / urllib.parse.unquote(parts.path))) if parts.path else path
            if file.is_dir() and file.is_relative_to(BOOK):
                file /= "index.html"
            named = urllib.parse.unquote(parts.fragment)
            if not file.exists() or named and file in pages and named not in pages[file].names:
                found.append(f"{path.relative_to(ROOT)}: {link}")
    return sorted(found), count


def main():
    build()
    correct_links()
    found, count = faults()
    if found:
        sys.exit("book: these links lead nowhere:\n" + "\n".join(found))
    if count < 500 or not list(BOOK.glob("searchindex*.js*")):
        sys.exit(f"book: it has {count} links, or no index for the search")
    print(f"the book has {len(list(BOOK.rglob('*.html')))} pages and {count} links")


if __name__ == "__main__":
    main()
