"""Which language a text is in, told by py3langid, whose model comes with the package.

It needs a few words. One to three words in Latin letters may be in any language that is written so, and a text without
letters is in every language.
"""

import functools
import re
import threading

LANGUAGES = frozenset(
    {
        "af", "ar", "bg", "bn", "ca", "cs", "cy", "da", "de", "el", "en", "es", "et", "fa", "fi", "fr", "gu", "he",
        "hi", "hr", "hu", "id", "it", "ja", "kn", "ko", "lt", "lv", "mk", "ml", "mr", "ne", "nl", "no", "pa", "pl",
        "pt", "ro", "ru", "sk", "sl", "so", "sq", "sv", "sw", "ta", "te", "th", "tl", "tr", "uk", "ur", "vi", "zh",
    }
)  # fmt: skip
"""ISO 639-1 codes that can be told apart; the model knows more, which would only be confused with these."""
_OTHER_SCRIPTS = frozenset(
    {
        "ar", "bg", "bn", "el", "fa", "gu", "he", "hi", "ja", "kn", "ko", "mk", "ml", "mr", "ne", "pa", "ru", "ta",
        "te", "th", "uk", "ur", "zh",
    }
)  # fmt: skip
_FEW_WORDS = 3
_TOLD_BY = 10_000
"""Characters by which a language is told; what is remembered is no longer either."""
_LATIN_WORD = re.compile(r"[A-Za-z\u00c0-\u024f]+")
_LETTER = re.compile(r"[^\W\d_]")
_loading = threading.Lock()


def language_of(code: str) -> str | None:
    """The language a code such as `zh-cn` means; None when it is not one of `LANGUAGES`."""
    language = code.strip().lower().replace("_", "-").split("-")[0]
    return language if language in LANGUAGES else None


def is_in(text: str, language: str) -> bool:
    """Whether `text` is in `language`, as far as one can tell."""
    if not _LETTER.search(text):
        return True
    if len(_LATIN_WORD.findall(text)) <= _FEW_WORDS and not _LETTER.search(_LATIN_WORD.sub("", text)):
        return language not in _OTHER_SCRIPTS
    return language == _likeliest(text[:_TOLD_BY])


@functools.lru_cache(maxsize=64)
def _likeliest(text: str) -> str:
    with _loading:  # the model is loaded by the first call
        import py3langid  # type: ignore[import-untyped]

        return next(str(language) for language, _ in py3langid.rank(text) if language in LANGUAGES)
