"""Extracts the terms of the memory guides: options, environment variables, functions, names of techniques, and figures.

    python extract_terms.py GUIDES > tests/suite/names/terms.tsv

GUIDES is a folder of guides in Markdown or reStructuredText (`*.txt`). Each term is one line: the guide (its file's name up to the
first `_`), the line where it first stands, its kind, the term. No sentence is taken over. Phrases of running text that no rule finds
are listed in phrases.txt beside the result; a phrase that stands in no guide is an error.

| kind | what |
|---|---|
| key | a path in a YAML block, or an assigned attribute or override (`policy.precision`) |
| setting | a key of YAML with a value that is neither a number nor a switch |
| value | a key of YAML, a variable or an argument with a number, or a list |
| name | an identifier in a code span, a formula, a block of code, or in running text |
| code | a code span of several words |
| shell | a word of a shell block |
| heading | a heading of at most six words, without its number |
| bold | as few words in bold, or the first cell of a table's row |
| acronym | a word with inner capitals or several of them |
| figure | a percentage, a factor, a size or a range, behind the heading or the bold words that it belongs to |
| phrase | a phrase of phrases.txt |
"""

import keyword
import pathlib
import re
import sys

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
PATH = rf"{NAME}(?:\.{NAME})*"
NUMBER = r"\d+(?:\.\d+)?"
RANGE = rf"{NUMBER}(?:\s?[-–]\s?{NUMBER})?"
FIGURE = re.compile(
    rf"[~≈]?\s?{RANGE}\s?%"  # a share
    rf"|[~≈]?\s?{RANGE}[x×](?![\w(])"  # a factor
    rf"|\*\s?{NUMBER}\b(?!\*)"  # a factor in code
    rf"|[~≈]?\s?{NUMBER}\s?[KMGT]B\+?"  # a size
    rf"|[~≈]\s?{RANGE}"  # about so much
    rf"|[<>]\s?{NUMBER}k?(?:\s\w+)?"  # a bound
    rf"|(?<![\w.]){NUMBER}\s?[-–]\s?{NUMBER}(?![\w.%])"  # a range
    rf"|{NUMBER}\*\*{NUMBER}"  # a power
    rf"|\b{NUMBER}[BM]\b\+?"  # parameters
    r"|\d+ forward pass(?:es)?"
)


# a docstring, or a string
STRING = re.compile(r'""".*|f?"([^"]*)"|\'([^\']*)\'')


def kept(string):
    """The text of a string that is a name, such as a key; nothing of others."""
    text = string[1] or string[2] or ""
    return f" {text} " if re.fullmatch(NAME, text) else " "


def tidy(text):
    """Words without markup, numbering and marks."""
    text = re.sub(r"[*`✅]|\\|\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*\d+\.\s+", "", text.strip())
    return " ".join(text.split()).rstrip(":").strip()


class Guide:
    """One guide, and the terms found so far, first mentions alone."""

    def __init__(self, path, seen):
        self.name = path.name.split("_")[0]
        self.lines = path.read_text(encoding="utf-8").split("\n")
        self.seen = seen
        self.found = []
        self.heading = ""

    def add(self, line, kind, term):
        term = " ".join(term.split())
        if kind in ("heading", "bold") and len(re.sub(r"\(.*\)", "", term).split()) > 6:
            return
        if not term or (kind, term) in self.seen or (kind != "key" and len(term) > 60):
            return
        self.seen.add((kind, term))
        self.found.append((self.name, line + 1, kind, term))

    def figures(self, line, text, owner=None):
        for match in FIGURE.finditer(text):
            figure = re.sub(r"(?<=[~≈<>*])\s+|\s+(?=%)", "", match[0].strip()).replace("–", "-")
            self.add(line, "figure", f"{owner or self.heading}: {figure}")

    def acronyms(self, line, text):
        for word in re.findall(r"[A-Za-z][A-Za-z0-9]*(?:-\d+)?", text):
            if len(re.findall(r"[A-Z]", word)) > 1:
                self.add(line, "acronym", word)

    def prose(self, line, text):
        plain = re.sub(r"https?://\S+|<[^>]*>`?_?|\(\S+\.md\)|:doc:`[^`]*`", " ", text)
        for span in re.findall(r"``([^`]+)``|`([^`]+)`", plain):
            self.span(line, span[0] or span[1])
        bold = [tidy(b) for b in re.findall(r"\*\*(.+?)\*\*", plain)]
        for words in bold:
            self.add(line, "bold", words)
        words = re.sub(r"``?[^`]+``?", " ", plain)
        for name in re.findall(rf"\b{NAME}\b", words):
            if "_" in name.strip("_"):
                self.add(line, "name", name)
        self.acronyms(line, words)
        # an entry of a numbered list is about what it begins with
        entry = re.match(r"\s*\d+\. \*\*(.+?)\*\*:", plain)
        self.figures(line, plain.replace("**", ""), tidy(entry[1]) if entry else None)

    def span(self, line, span):
        """A code span: a name, a name with a value, an expression, or words."""
        name, _, value = span.partition(": ") if ": " in span else span.partition("=")
        if re.fullmatch(rf"{PATH}(?:\(\))?", name.strip()) and re.fullmatch(r"[\w.'\"]*", value):
            self.add(line, "name", name.strip().removesuffix("()"))
            if re.fullmatch(r"\d+", value):
                self.add(line, "value", f"{name}: {value}")
            if ": " in span and re.fullmatch(r"[a-z]\w*", value):
                self.add(line, "setting", span)
            return
        if re.fullmatch(r"[A-Za-z][\w -]*|\w+: .*|[\w-]+\.\w+", span.strip()) and not re.search(r"[=×(]", span):
            self.add(line, "code", span.strip())
            return
        for name in re.findall(PATH, span):
            self.add(line, "name", name)

    def yaml(self, first, block):
        owners = []
        for offset, text in enumerate(block):
            entry = re.match(rf"^(\s*)({NAME}):\s*(.*?)\s*(#.*)?$", text)
            if not entry:
                continue
            depth = len(entry[1])
            while owners and owners[-1][0] >= depth:
                owners.pop()
            path = ".".join([name for _, name in owners] + [entry[2]])
            value = entry[3].strip("\"'")
            owners.append((depth, entry[2]))
            self.add(first + offset, "key", path)
            if re.fullmatch(r"[a-z]\w*", value) and value not in ("true", "false"):
                self.add(first + offset, "setting", f"{entry[2]}: {value}")
            elif re.match(r"[\d\[]", value):
                self.add(first + offset, "value", f"{entry[2]}: {value}")

    def shell(self, first, block):
        for offset, text in enumerate(block):
            for word in text.split("#")[0].split():
                name, equals, value = word.partition("=")
                if equals and re.fullmatch(PATH, name):
                    self.add(first + offset, "key" if "." in name else "shell", name)
                    word = value
                stem = re.match(r"[\w-]+(?:\.\w+)*", word.strip("\"'").split("/")[-1])
                if stem and not word.startswith("-"):
                    self.add(first + offset, "shell", stem[0])

    def code(self, first, block):
        """Identifiers of code or of a formula, comments and text apart."""
        for offset, text in enumerate(block):
            line = first + offset
            self.figures(line, text.split("#")[0])
            for name, value in re.findall(rf"({NAME})\s*=\s*(\d[\d.]*)(?=\s*(?:,|\)|#|$))", text):
                self.add(line, "value", f"{name}: {value}")
            label = re.match(rf"^({NAME}): [A-Z]", text)
            if label:
                self.add(line, "name", label[1])
                continue
            text = STRING.sub(kept, text.split("#")[0])
            for path in re.findall(PATH, text):
                assigned = re.match(rf"\s*{re.escape(path)}\s*=[^=]", text)
                kind = "key" if "." in path and assigned else "name"
                if not keyword.iskeyword(path):
                    self.add(line, kind, path)

    def read(self):
        lines, at = self.lines, 0
        while at < len(lines):
            text = lines[at]
            fence = re.match(r"^\s*```(\w*)", text)
            directive = re.match(r"^\.\. code-block:: (\w+)", text)
            under = lines[at + 1] if at + 1 < len(lines) else ""
            if fence:
                end = next(i for i in range(at + 1, len(lines)) if lines[i].strip().startswith("```"))
                self.block(fence[1], at + 1, lines[at + 1 : end])
                at = end
            elif directive:
                end = at + 1
                while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
                    end += 1
                self.block(directive[1], at + 1, lines[at + 1 : end])
                at = end - 1
            elif re.match(r"^#+ ", text) or (text.strip() and re.fullmatch(r"[=~-]{4,}", under)):
                self.heading = tidy(text.lstrip("#"))
                self.add(at, "heading", self.heading)
                self.acronyms(at, self.heading)
                for span in re.findall(r"`([^`]+)`", text):
                    self.span(at, span)
                self.figures(at, self.heading)
            elif re.match(r"^\|", text):
                cells = [tidy(c) for c in text.strip("|").split("|")]
                if not re.fullmatch(r"[-: ]*", cells[0]):
                    self.add(at, "bold", cells[0])
                    self.figures(at, " ".join(cells[1:]), cells[0])
            elif not re.match(r"^\s*(\.\.|:\w+:)|^[=~-]{4,}$", text):
                self.prose(at, text)
            at += 1

    def block(self, language, first, block):
        {"yaml": self.yaml, "bash": self.shell}.get(language, self.code)(first, block)


def phrases(guides, path):
    """Phrases of running text, where they first stand."""
    for phrase in path.read_text(encoding="utf-8").splitlines():
        if not phrase or phrase.startswith("#"):
            continue
        for guide in guides:
            at = next((i for i, text in enumerate(guide.lines) if phrase.lower() in text.lower()), None)
            if at is not None:
                guide.add(at, "phrase", phrase)
                break
        else:
            sys.exit(f"{path.name}: {phrase!r} stands in no guide")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    seen, guides = set(), []
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.txt")):
        guide = Guide(path, seen)
        guide.read()
        guides.append(guide)
    phrases(guides, pathlib.Path(__file__).parent.parent / "suite/names/phrases.txt")
    print("guide\tline\tkind\tterm")
    for guide in guides:
        for term in sorted(guide.found, key=lambda t: t[1]):
            print(*term, sep="\t")


main()
