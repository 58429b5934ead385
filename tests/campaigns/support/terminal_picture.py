"""A terminal's screen as SVG: text as text, and what is drawn with characters (lines, blocks, Braille dots) as shapes, so that it looks
the same in every font."""

import re
import unicodedata
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 8.4, 18
MARGIN = 14
TEXT, PAGE, SOFT = "#d8dade", "#16181c", "#8b919c"
COLOURS = ["#16181c", "#ef6b6b", "#5fc08a", "#e3b341", "#5c9dff", "#c78bf0", "#4cc3d9", "#d8dade", SOFT, "#ff8f8f", "#86e0ac", "#ffd866", "#8abaff", "#dcb0ff", "#86e3f5", "#ffffff"]
# lines to the left, right, up and down
BOX = {"─": "lr", "│": "ud", "┌": "rd", "┐": "ld", "└": "ru", "┘": "lu", "├": "rud", "┤": "lud", "┬": "lrd", "┴": "lru", "┼": "lrud",
       "╭": "rd", "╮": "ld", "╰": "ru", "╯": "lu", "━": "lr", "┃": "ud"}
SHADES = {"█": 1, "▓": 0.75, "▒": 0.5, "░": 0.3, "▚": 0.6, "▤": 0.65, "▥": 0.55, "▦": 0.8}
# bits of a Braille character, by column and row of its dots
DOTS = {0: (0, 0), 1: (0, 1), 2: (0, 2), 3: (1, 0), 4: (1, 1), 5: (1, 2), 6: (0, 3), 7: (1, 3)}


def cells(screen):
    """The screen of `tmux capture-pane -e` as rows of (character, colour, bold)."""
    rows, colour, bold, reverse = [], TEXT, False, False
    for line in screen.rstrip("\n").split("\n"):
        row = []
        for sequence, character in re.findall(r"\x1b\[([\d;]*)m|([^\x1b])", line):
            if character:
                if unicodedata.combining(character):
                    continue
                row.append((character, colour, bold, reverse))
                continue
            codes = [int(code or 0) for code in sequence.split(";")]
            while codes:
                code = codes.pop(0)
                if code == 0:
                    colour, bold, reverse = TEXT, False, False
                elif code == 1:
                    bold = True
                elif code == 22:
                    bold = False
                elif code in (7, 27):
                    reverse = code == 7
                elif 30 <= code <= 37:
                    colour = COLOURS[code - 30]
                elif 90 <= code <= 97:
                    colour = COLOURS[code - 82]
                elif code == 39:
                    colour = TEXT
                elif code == 38 and codes[:1] == [5]:
                    colour = COLOURS[codes[1] % 16]
                    del codes[:2]
        rows.append(row)
    return rows


def svg(screen, columns, title):
    """The picture."""
    rows = cells(screen)
    width, height = columns * WIDTH + 2 * MARGIN, len(rows) * HEIGHT + 2 * MARGIN
    shapes, texts = {}, []
    number = lambda value: f"{value:.1f}".rstrip("0").rstrip(".")

    def shape(colour, opacity, path):
        shapes.setdefault((colour, opacity), []).append(path)

    for y, row in enumerate(rows):
        x = 0
        while x < len(row):
            character, colour, bold, reverse = row[x]
            left, top = MARGIN + x * WIDTH, MARGIN + y * HEIGHT
            if 0x2800 <= ord(character) <= 0x28FF:
                for bit, (column, line) in DOTS.items():
                    if (ord(character) - 0x2800) >> bit & 1:
                        shape(colour, 1, f"M{number(left + 1 + column * WIDTH / 2)} {number(top + 1.2 + line * HEIGHT / 4)}h2v2h-2z")
            elif character in SHADES:
                shape(colour, SHADES[character], f"M{number(left)} {number(top + 2)}h{WIDTH}v{HEIGHT - 4}h-{WIDTH}z")
            elif character in BOX:
                middle, centre = left + WIDTH / 2, top + HEIGHT / 2
                ends = {"l": (left, centre), "r": (left + WIDTH, centre), "u": (middle, top), "d": (middle, top + HEIGHT)}
                for end in BOX[character]:
                    (a, b), half = ends[end], 0.5
                    x0, x1, y0, y1 = min(a, middle) - half, max(a, middle) + half, min(b, centre) - half, max(b, centre) + half
                    shape(colour, 0.8, f"M{number(x0)} {number(y0)}h{number(x1 - x0)}v{number(y1 - y0)}h-{number(x1 - x0)}z")
            elif character != " ":
                end = x
                plain = lambda own: own[1:] == (colour, bold, reverse) and own[0] not in SHADES and own[0] not in BOX and not 0x2800 <= ord(own[0]) <= 0x28FF
                while end < len(row) and plain(row[end]) and not (row[end][0] == " " and (end + 1 == len(row) or row[end + 1][0] == " ")):
                    end += 1
                text = "".join(own[0] for own in row[x:end])
                ink = colour
                if reverse:
                    shape(colour, 1, f"M{number(left)} {number(top)}h{number(len(text) * WIDTH)}v{HEIGHT}h-{number(len(text) * WIDTH)}z")
                    ink = PAGE
                weight = ' font-weight="700"' if bold else ""
                texts.append(f'<text x="{number(left)}" y="{number(top + 13.2)}" textLength="{number(len(text) * WIDTH)}" fill="{ink}"{weight}>{escape(text)}</text>')
                x = end - 1
            x += 1
    faded = lambda opacity: "" if opacity == 1 else f' opacity="{opacity}"'
    drawn = [f'<path fill="{colour}"{faded(opacity)} d="{str().join(paths)}"/>' for (colour, opacity), paths in shapes.items()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(width)} {number(height)}" width="{number(width)}" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="100%" height="100%" rx="9" fill="{PAGE}"/>\n' + "\n".join(drawn)
        + '\n<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, &quot;DejaVu Sans Mono&quot;, monospace" font-size="14" xml:space="preserve">\n' + "\n".join(texts) + "\n</g>\n</svg>\n")
