#!/usr/bin/env python3
"""Makes an SVG picture of a terminal from what a session printed.

script -qec scripts/demo.sh session.txt
scripts/picture.py --title "make demo" < session.txt > docs/terminal.svg

Understands lines, bold, dim and the 256 colours; other control sequences are left out.
"""

import argparse
import html
import re
import sys

CHARACTER_WIDTH = 8.4
LINE_HEIGHT = 19
MARGIN = 16
BAR = 34
BACKGROUND, BAR_COLOUR, TEXT, DIM = "#16181d", "#23262e", "#d7dae0", "#8b93a3"
# The cube and the greys of the 256 colours; the first 16 as most terminals show them.
FIRST = "000000 cd3131 0dbc79 e5e510 2472c8 bc3fbc 11a8cd e5e5e5 666666 f14c4c 23d18b f5f543 3b8eea d670d6 29b8db ffffff"


def colour(number):
    if number < 16:
        return "#" + FIRST.split()[number]
    if number < 232:
        number -= 16
        levels = [0, 95, 135, 175, 215, 255]
        return "#%02x%02x%02x" % (levels[number // 36], levels[number // 6 % 6], levels[number % 6])
    return "#%02x%02x%02x" % ((8 + 10 * (number - 232),) * 3)


def pieces(line):
    """The line as pairs of text and SVG style."""
    style = {}
    for part in re.split(r"(\x1b\[[0-9;]*m)", line):
        if part.startswith("\x1b["):
            codes = [int(code or 0) for code in part[2:-1].split(";")]
            if codes[0] == 0:
                style = {}
            elif codes[0] == 1:
                style["font-weight"] = "bold"
            elif codes[0] == 2:
                style["fill"] = DIM
            elif codes[:2] == [38, 5] and len(codes) > 2:
                style["fill"] = colour(codes[2])
        elif part:
            yield part, dict(style)


def words(text):
    """The parts between runs of several spaces, which browsers show as one, with the column of each."""
    return [(part.start(), part.group()) for part in re.finditer(r"\S+(?: \S+)*", text)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--title", default="")
    parser.add_argument("--columns", type=int, default=104, help="longer lines are cut")
    arguments = parser.parse_args()
    text = sys.stdin.read().replace("\r\n", "\n")
    # Removes the lines that `script` adds, and all sequences except colours.
    text = "\n".join(line for line in text.split("\n") if not re.match(r"Script (started|done)", line)).strip("\n")
    # A line that was rewritten in place appears in its last form.
    text = "\n".join(line.rsplit("\r\x1b[K")[-1] for line in text.split("\n"))
    text = re.sub(r"\x1b(\[[0-9;?]*[A-LN-Za-ln-z]|[78D])", "", text).replace("\r", "")
    lines = [list(pieces(line)) for line in text.split("\n")]
    width = round(arguments.columns * CHARACTER_WIDTH + 2 * MARGIN)
    height = BAR + len(lines) * LINE_HEIGHT + MARGIN
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">')
    print(f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>')
    print(f'<path d="M0 {BAR}V8a8 8 0 0 1 8-8H{width - 8}a8 8 0 0 1 8 8V{BAR}z" fill="{BAR_COLOUR}"/>')
    for index, fill in enumerate(["#ff5f56", "#ffbd2e", "#27c93f"]):
        print(f'<circle cx="{20 + 20 * index}" cy="{BAR // 2}" r="6" fill="{fill}"/>')
    print(f'<g font-family="ui-monospace, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="14" fill="{TEXT}">')
    print(f'<text x="{width // 2}" y="{BAR // 2 + 5}" text-anchor="middle" fill="{DIM}">{html.escape(arguments.title)}</text>')
    for number, line in enumerate(lines):
        y = BAR + 20 + number * LINE_HEIGHT
        column = 0
        for text, style in line:
            text = text[: max(0, arguments.columns - column)]
            attributes = "".join(f' {name}="{value}"' for name, value in style.items())
            for start, part in words(text):
                x = MARGIN + (column + start) * CHARACTER_WIDTH
                length = len(part) * CHARACTER_WIDTH
                # The length is given, so that columns align in any font.
                print(
                    f'<text x="{x:.1f}" y="{y}" textLength="{length:.1f}"'
                    f' lengthAdjust="spacingAndGlyphs"{attributes}>{html.escape(part)}</text>'
                )
            column += len(text)
    print("</g>\n</svg>")


main()
