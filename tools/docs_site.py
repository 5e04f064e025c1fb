"""What `make docs` adds to mkdocs: links that lead out of docs/, anchors as a repository browser writes them, and
unbroken flags.

Invariant: a relative link that works where the repository is browsed works on the site. A file outside docs/ that a
page links to is on the site too, under source/: Markdown as a page, images and data as they are, anything else as code.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^][]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")  # of one file to another
LOOKED_UP = {"reference.md": 20, "glossary.md": 5, "run.md": 5}  # what the search finds first, long as these pages are
AS_THEY_ARE = {".png", ".csv", ".json"}  # linked files that the site has as files and not as pages
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"  # the search finds the docs, not the code


def on_config(config: MkDocsConfig) -> None:
    """Headings get the anchors that a repository browser gives them."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add a page for each file outside docs/ that a page links to, or a page so added."""
    waiting = [PurePosixPath("docs", file.src_uri) for file in files.documentation_pages()]
    known = set(waiting)
    while waiting:
        source = waiting.pop()
        if source.suffix in AS_THEY_ARE:
            files.append(File.generated(config, site_path(source), abs_src_path=str(ROOT / source)))
            continue
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.parts[0] != "docs":
            shown = relinked(text, source, files) if source.suffix == ".md" else code(source, text)
            files.append(File.generated(config, site_path(source), content=HIDDEN + shown))
        if source.suffix == ".md":
            new = {leads(link[2], source) for link in LINK.finditer(text)} - known
            waiting += [path for path in new if path.parts[0] != "docs" and (ROOT / path).is_file()]
            known |= new


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page in docs/ lead to pages of the site, and the search know what is looked up most."""
    if page.file.generated_by:
        return markdown
    if page.file.src_uri in LOOKED_UP:
        page.meta["search"] = {"boost": LOOKED_UP[page.file.src_uri]}
    return relinked(markdown, PurePosixPath("docs", page.file.src_uri), files)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark code without spaces, which site.css does not break: a flag stays in one line."""
    return re.sub(r"<code>([^\s<]+)</code>", r'<code class="word">\1</code>', html)


def relinked(markdown: str, source: PurePosixPath, files: Files) -> str:
    """The text of a file of the repository, its links between files as they are on the site.

    Where a link's text is the name of a file, which is all that a repository browser shows, it is the page's title.
    """
    here = PurePosixPath(site_path(source)).parent

    def moved(link: re.Match[str]) -> str:
        path = site_path(leads(link[2], source))
        file = files.get_file_from_path(path)
        title = file.page.title if file is not None and file.page is not None else None
        text = title if title and link[1].endswith(PurePosixPath(link[2]).name) else link[1]
        return f"[{text}]({os.path.relpath(path, here)}{link[3] or ''})"

    return LINK.sub(moved, markdown)


def leads(link: str, source: PurePosixPath) -> PurePosixPath:
    """The file of the repository that a relative link in `source` leads to."""
    return PurePosixPath(os.path.normpath(source.parent / link))


def site_path(path: PurePosixPath) -> str:
    """Where a file of the repository is on the site, before it becomes HTML."""
    if path.parts[0] == "docs":
        return str(PurePosixPath(*path.parts[1:]))
    is_itself = path.suffix == ".md" or path.suffix in AS_THEY_ARE
    return f"source/{path if is_itself else f'{path}.md'}"


def code(path: PurePosixPath, text: str) -> str:
    """A page that shows a file."""
    kind = {".py": "python", ".toml": "toml"}.get(path.suffix, "text")
    return f"# {path.name}\n\n`{path}`\n\n~~~~~~ {kind}\n{text}\n~~~~~~\n"
