"""What the documentation site needs beside docs/: the pages at the root, and the files that pages link to.

Pages link as repository hosts want it: `../examples/train_gpt.py` from docs/, `docs/state.md` from the root.
In the site

* CONTRIBUTING.md and CHANGELOG.md are pages, and README.md is index.md, which says the same,
* a Markdown file outside of docs/ is a page, `source/notes/log.md`,
* any other text file there is a page that shows it, `source/examples/train_gpt.py.md`,
* a folder is a page that lists its files, and any other file (an image, data) is copied,

and each link leads there. A link to something that does not exist stays as it is, and the strict build
refuses it. llms.txt lists the pages of the navigation with their first sentences, for programs that read
(llmstxt.org).
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported below: a test, whose environment has no mkdocs, reads llms()
    from mkdocs.structure.files import File, Files

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".yml": "yaml", "": "text"}
ROOT_PAGES = {site: path for path, site in PAGES.items() if site != "index.md"}

FENCE = re.compile(r"^ *(`{3,}).*?^ *\1`* *$", re.M | re.S)
LINK = re.compile(r"(?<=\]\()([^()\s#]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the root, and what they and the pages of docs/ link to."""
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    for site, path in ROOT_PAGES.items():
        files.append(File.generated(config, site, abs_src_path=str(root / path)))
    for page in [file for file in files if file.src_uri.endswith(".md")]:
        _add_linked(root, page, files, config)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to what is outside of docs/, and write pipes in tables' code as this Markdown wants."""
    uri = page.file.src_uri

    def turned(match: re.Match[str]) -> str:
        path = _path(match[1], uri)
        site = _site(path) if path is not None else None
        found = site is not None and files.get_file_from_path(site) is not None
        return (
            posixpath.relpath(site, posixpath.dirname(uri) or ".") if site is not None and found else match[1]
        )

    return _outside_code(markdown, lambda text: LINK.sub(turned, _pipes(text)))


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Names in tables may break after a dot or an underscore, so that tables fit on a phone."""

    def breakable(code: re.Match[str]) -> str:
        return "<code>" + re.sub(r"(?<=[_.=(,/:])(?=[\w&])", "<wbr>", code[1]) + "</code>"

    return re.sub(
        r"<td[^>]*>.*?</td>",
        lambda cell: re.sub(r"<code>([^<]*)</code>", breakable, cell[0]),
        html,
        flags=re.S,
    )


def on_post_build(config: Any) -> None:
    root = Path(config.config_file_path).parent
    (Path(config.site_dir) / "llms.txt").write_text(
        llms(root, config.site_name, config.site_description, config.nav)
    )


def llms(root: Path, name: str, description: str, nav: list[Any]) -> str:
    """llms.txt: a section for each tab of the navigation, a line for each page."""
    lines = [f"# {name}", "", f"> {description}"]
    for entry in nav:
        (title, inside), *_ = entry.items() if isinstance(entry, dict) else [("Start", entry)]
        lines += ["", f"## {title}", "", *(_line(root, page) for page in _pages(inside))]
    return "\n".join(lines) + "\n"


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in _pages(entry)]


def _line(root: Path, page: str) -> str:
    """`- [title](page): the first sentence`."""
    text = FENCE.sub("", (root / ROOT_PAGES.get(page, f"docs/{page}")).read_text())
    title = re.search(r"^# (.+)$", text, re.M)
    first = re.search(r"^[A-Za-z`\[](?:.|\n(?!\n))*", text[title.end() :] if title else text, re.M)
    plain = re.sub(r"\[(.*?)\]\([^)]*\)", r"\1", " ".join(first[0].split())) if first else ""
    sentence = re.split(r"(?<=[.?!:]) (?=[A-Z`])", plain)[0].rstrip(":")
    name, says = title[1] if title else page, f": {sentence}" if sentence else ""
    return f"- [{name}]({page.removesuffix('.md')}.html){says}"


def _outside_code(markdown: str, change: Any) -> str:
    """`markdown` with `change` applied to what is in no fenced code."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join(part if isinstance(part, str) else "" for part in [*parts, change(markdown[end:])])


def _pipes(text: str) -> str:
    r"""In the rows of tables, `a\|b` is written as `a|b`: the backslash would be shown."""
    rows = re.compile(r"^\|.*\\\|.*$", re.M)
    return rows.sub(lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]), text)


def _path(target: str, uri: str) -> str | None:
    """The path in the repository of what a page links to; None for another site."""
    if re.match(r"[a-z]+:", target) or target.startswith("/"):
        return None
    here = ROOT_PAGES.get(uri) or (
        uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"
    )
    return posixpath.normpath(posixpath.join(posixpath.dirname(here), target))


def _site(path: str) -> str:
    """Where the site has that file."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in PAGES:
        return PAGES[path]
    file = Path(__file__).parent / path
    if file.is_dir():
        return f"source/{path}/index.md"
    return f"source/{path}.md" if file.suffix in LANGUAGES else f"source/{path}"


def _add_linked(root: Path, page: File, files: Files, config: Any) -> None:
    """Add what a page links to outside of docs/."""
    _outside_code(
        page.content_string, lambda text: [_add(root, path, files, config) for path in _targets(text, page)]
    )


def _targets(text: str, page: File) -> list[str]:
    paths = [_path(target, page.src_uri) for target in LINK.findall(text)]
    return [path for path in paths if path is not None and not path.startswith("docs/") and path not in PAGES]


def _add(root: Path, path: str, files: Files, config: Any) -> None:
    """Add a page with that file, or with the list of that folder; nothing if it does not exist."""
    from mkdocs.structure.files import File

    site, source = _site(path), root / path
    if (
        not source.exists()
        or not source.resolve().is_relative_to(root.resolve())
        or files.get_file_from_path(site) is not None
    ):
        return
    if source.is_dir():
        inside = [
            entry
            for entry in sorted(source.iterdir())
            if entry.suffix in {*LANGUAGES, ".md"} and entry.is_file()
        ]
        lines = [f"* [{entry.name}]({posixpath.basename(_site(f'{path}/{entry.name}'))})" for entry in inside]
        files.append(File.generated(config, site, content=_page(path, "\n".join(lines))))
        for entry in inside:
            _add(root, f"{path}/{entry.name}", files, config)
    elif source.suffix in LANGUAGES:
        code = f"`````{LANGUAGES[source.suffix]}\n{source.read_text().rstrip()}\n`````"
        files.append(File.generated(config, site, content=_page(path, code)))
    else:
        files.append(page := File.generated(config, site, abs_src_path=str(source)))
        if source.suffix == ".md":
            _add_linked(root, page, files, config)


def _page(title: str, text: str) -> str:
    return f"---\ntitle: {title}\nsearch:\n  exclude: true\n---\n\n# `{title}`\n\n{text}\n"
