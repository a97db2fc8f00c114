"""Settings of Sphinx for the site; `python -m docs.site` makes its sources and calls it."""

from typing import Any

from nemo_gym import __version__

project = "nemo_gym"
version = release = __version__
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 6
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]  # examples leave things out with "…", which no lexer knows
exclude_patterns = ["files"]

html_theme = "furo"
html_title = f"nemo_gym {__version__}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = html_show_copyright = False
html_theme_options: dict[str, Any] = {"navigation_with_keys": True, "footer_icons": []}
