"""MkDocs hooks: what the site does with pages that are also read on a code host.

Links that leave docs/ lead to the repository's pages. Python with prompts is highlighted as a session. A picture that
has colors for light and for dark paper follows the site's switch, not the reader's operating system.
"""

import re
from pathlib import Path
from posixpath import normpath
from typing import Any

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")
FENCE = re.compile(r"^```python\n(?=>>> )", re.MULTILINE)
PICTURE = re.compile(r'<img ([^>]*)src="([^"]+)\.svg"([^>]*)>')
DARK = re.compile(r"@media \(prefers-color-scheme: dark\)\{(.*?\})\}", re.DOTALL)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Make links out of docs/ absolute, and mark Python sessions as such."""
    folder = f"docs/{page.file.src_uri}".rpartition("/")[0]

    def absolute(found: re.Match[str]) -> str:
        path = normpath(f"{folder}/{found[1]}")
        if path.startswith("docs/"):
            return found[1]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{config['repo_url']}/{kind}/main/{path}"

    return FENCE.sub("```pycon\n", LINK.sub(absolute, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Show a picture twice: the theme hides the one that is drawn for the other color scheme."""
    return PICTURE.sub(r'<img \1src="\2.light.svg#only-light"\3><img \1src="\2.dark.svg#only-dark"\3>', html)


def on_post_build(config: Any, **_: Any) -> None:
    """Write each picture in its light and in its dark colors."""
    for picture in (Path(config["site_dir"]) / "images").glob("*.svg"):
        svg = picture.read_text(encoding="utf-8")
        for name, replacement in (("light", ""), ("dark", r"\1")):
            picture.with_name(f"{picture.stem}.{name}.svg").write_text(DARK.sub(replacement, svg), encoding="utf-8")
