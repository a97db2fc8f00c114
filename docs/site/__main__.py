"""`python -m docs.site build/docs`: gather the pages, build them strictly, check what came out.

Any link, heading or picture that is missing fails the build, and so does a page that would load anything from the
network. The site is `build/docs/html`.
"""

import re
import subprocess
import sys
from pathlib import Path

from docs.site import llms
from docs.site.pages import Site, site

_HERE = Path(__file__).parent
_LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc=[\"'](?P<src>[^\"']+)"
    r"|<link\b(?=[^>]*\brel=[\"'](?:stylesheet|preload|preconnect|icon|shortcut icon))"
    r"[^>]*?\bhref=[\"'](?P<href>[^\"']+)"
    r"|url\([\"']?(?P<url>(?:https?:)?//[^)\"']+)|@import\s+[\"'](?P<imported>[^\"']+)"
)


def main(folder: Path) -> int:
    """Build into `folder`; 1 and a list of what is wrong, or 0."""
    made = site()
    problems = made.problems()
    if not problems:
        made.write(folder / "source")
        Site(llms.files(made)).write(folder / "extra")
        if _sphinx(folder):
            return 1
        problems = from_the_network(folder / "html")
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{len(made.pages)} pages: {folder / 'html' / 'index.html'}")
    return 1 if problems else 0


def _sphinx(folder: Path) -> int:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-j", "2", "-c", str(_HERE)]
    extra = ["-D", f"html_extra_path={(folder / 'extra').absolute()}"]
    return subprocess.call(
        [*command, *extra, "-d", str(folder / "cache"), str(folder / "source"), str(folder / "html")]
    )


def from_the_network(html: Path) -> list[str]:
    """Everything that a reader's browser would fetch from elsewhere."""
    found = []
    for file in sorted([*html.rglob("*.html"), *html.rglob("*.css")]):
        for match in _LOADED.finditer(file.read_text(encoding="utf-8")):
            address = next(filter(None, match.groups()))
            if re.match(r"(https?:)?//", address):
                found.append(f"{file.relative_to(html)} loads {address}")
    return found


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
