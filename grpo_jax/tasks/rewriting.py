"""Parse the prompt to render from a chat policy's answer; if it is invalid, the user's prompt is rendered instead."""

from __future__ import annotations

import json
import re

from grpo_jax.rollout.encoding import ParsedCompletion


def _begins(*phrases: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:{'|'.join(phrases)})", re.IGNORECASE)


_COLON = "[:：]"
_END = r"(?:(?<=[\u4e00-\u9fff])|\b)"  # of a word; Chinese has none
_HERE = (
    *(r"here(?:[’']s| is| are| you go)?", "below", "this is", "these are", "the following"),
    *("voici", "hier ist", "aquí", "aqui", "ecco", "вот", "以下", "这是"),
)
_KINDS = (
    *("the", "an?", "my", "your", "new", "final", "better", "improved", "enhanced", "rewritten", "revised", "refined"),
    *("optimi[sz]ed", "updated", "image", "full", "detailed", "expanded", "positive", "main", "text-to-image"),
    *("image[ -]generation", "stable[ -]diffusion", "sdxl", "midjourney"),
)
_NAMES = (
    *("prompt", "rewrite", "rewritten", "enhanced", "output", "answer", "result", "version", "option", "variation"),
    *("(?:改写|优化)后的提示词?", "提示词?", "プロンプト"),
)
_REWRITE = (
    *(r"prompts?\b", r"rewrites?\b", r"rewritten\b", "提示词?"),
    r"(?:versions?|descriptions?|captions?)(?=\s*[:：.!]| (?:of|for) (?:the|your|this|that|it|you)\b| that\b)",
)

_LABEL = _begins(
    rf"(?:/imagine )?(?:(?:{'|'.join(_KINDS)})\s+)*(?:{'|'.join(_NAMES)})"
    rf"(?:\s+#?(?:\d+|[a-c]))?(?:\s*\([^)]*\))?(?: is)?\s*{_COLON}\s*"
)
"""Label before a prompt: "Prompt:", "Enhanced prompt:", "Option 1 (vivid):"."""
_ANNOUNCEMENT = _begins(
    rf"(?:{'|'.join(_HERE)}){_END}[^:：]*(?:{'|'.join(_REWRITE)})(?:[^:：]*{_COLON}\s*|[.!]$)",
    rf"[^:：]*\b(?:this|your|following) (?:\w+ )?prompt(?:, \w+)?\s*{_COLON}\s*",
)
"""Announcement of a prompt: "Here is the rewritten prompt: …"."""
_INTERJECTION = _begins(
    r"(?:sure(?: thing)?|certainly|of course|okay|ok|all ?right|absolutely|definitely|understood|got it|no problem"
    r"|great(?: (?:choice|idea|prompt|question)|(?=!)))\s*[,!.:]+\s*"
)
_OPENING = _begins(rf"(?:sure|certainly|of course|okay|ok|absolutely|great|{'|'.join(_HERE)}){_END}")
_DISCLAIMER = _begins(
    r"(?:i|i[’']m|as an?|unfortunately|sorry)\b[^:：]*\b(?:but|however),? (?=here(?:[’']s| is| are)\b)",
)
"""Disclaimer of a model that cannot draw, before the prompt."""
_REMARK = _begins(
    r"i(?:[’']d| would) (?:be (?:happy|glad|delighted)|love)\b",
    r"(?:i[’']m |i am )?(?:happy|glad) to\b",
    r"i(?:[’']ve| have) (?:rewritten|enhanced|improved|refined|revised|expanded|added|made|kept|created|crafted)\b",
    r"let(?:[’']s| me) (?:know|craft|create|enhance|rewrite|refine|improve|expand|think|break|start)\b",
    r"please (?:provide|share|specify|give me)\b",
    r"feel free\b",
    r"thank(?:s| you) for\b",
)
"""Remark of a chat model about itself, or to the user."""
_CLOSING = re.compile(
    r"(?<=[.!?\"”*])\s+(?:let me know|feel free|would you like|(?:i )?hope this"
    r"|i(?:[’']ve| have) (?:added|rewritten|kept)|this (?:prompt|version|rewrite|revised|enhanced)|\(?note:)\s.*$",
    re.IGNORECASE,
)
"""Remark after a prompt, in the same line."""
_NEGATIVE = re.compile(
    rf"(?:^|(?<=\W))\(?(?:negative[ _]prompts?\b|(?:负面|反向|负向)提示词?)[^:：]{{0,30}}{_COLON}.*$", re.IGNORECASE
)
_HEADING = _begins(r"#+\s", rf"(?:title|original(?: prompt)?)\s*{_COLON}")

_DEEDS = (
    *(r"help(?: you)?(?: (?:with|create|in)|\W*$)", "assist", "create", "generate", "provide", "produce"),
    *("fulfil+", "comply", "write", "rewrite", r"do (?:that|this|so)\W*$", "engage", "continue with", "depict"),
    *("respond", "discuss", "process", "offer", "participate", "promote", "accommodate", "proceed", "satisfy"),
    *("enhance", "improve"),
)
_SORRY = r"(?:(?:i[’']?m|i am) )?(?:(?:so|very|really|truly) )?sorry"
_REFUSAL = _begins(
    rf"{_SORRY},? but\b",
    r"(?:i apologi[sz]e|my apologies),? (?:but|for)\b",
    r"as an? (?:[\w-]+ ){0,2}(?:ai|model|assistant),? (?:i\b|my\b|it[’']?s against)",
    r"(?:it (?:seems|looks) like )?(?:this|that|your) request (?:violates|goes against|is against)\b",
    rf"(?:{_SORRY}[,.!] |unfortunately,? )?i(?:[’']?m| am)? ?(?:can(?:no|[’'])t|can not|won[’']t|will not"
    rf"|(?:unable|not able) to|won[’']t be able to)(?:\W*$| (?:\w+ly )?(?:{'|'.join(_DEEDS)})\b)",
    r"i must (?:respectfully )?decline|i (?:do not|don[’']t) feel comfortable|i(?:[’']?m| am) not comfortable",
    r"很?抱歉|对不起|申し訳|lo siento,? (?:pero )?no puedo|désolée?,? (?:mais )?je ne|je suis désolée?,",
    r"es tut mir leid,? (?:aber )?|извините, (?:но )?я не|mi dispiace, (?:ma )?non posso",
)
"""Refusal: an apology or an inability to help; not every sentence that begins with "I can't"."""
_BULLET = _begins(r"[-*•]\s+", r"\d{1,2}[.)]\s+", r"#+\s+", r">\s+")
_FENCE = re.compile(r"```(?:\w*\n)?(.*?)(?:```|\Z)", re.DOTALL)
_MEMBER = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:\s*\[?\s*"((?:[^"\\]|\\.)*)')
_TAG_NAME = r"(?:[a-z]+_)*(?:prompt|answer|output|response|rewrite)"
_TAG = re.compile(rf"</?{_TAG_NAME}>", re.IGNORECASE)
_TAGGED = re.compile(rf"(?is)<((?!negative|original|input|user){_TAG_NAME})>((?:(?!<\1>).)*?)(?:</\1>|\Z)")
_QUOTES = {'"': '"', "“": "”", "«": "»", "'": "'", "‘": "’", "`": "`", "*": "*"}


def parse_rewrite(text: str, prompt: str) -> ParsedCompletion:
    """Parse the prompt to render from a chat model's answer.

    It drops reasoning, then takes a code fence, a JSON object's prompt, the text in tags such as <answer>, or a line
    labelled "Prompt:", if there is one. It removes remarks ("Sure! Here is …:", "I've added …"), headings, labels, list
    marks, bold marks and enclosing quotes. The first remaining line is the prompt, with lines that a comma joins to it.
    Negative prompts are dropped, since a renderer has one for all pictures. Without a letter or digit, or for a
    refusal, the result is the user's `prompt`, and not `valid`.
    """
    lines = [line for line in map(_bare, _content(_without_thinking(text)).splitlines()) if _has_words(line)]
    sentences = re.split(r"(?<=[.!])\s+", _DISCLAIMER.sub("", _INTERJECTION.sub("", "".join(lines[:1]))))
    if any(_REFUSAL.match(_clean(sentence)) for sentence in sentences):
        return ParsedCompletion(prompt, False)
    answer = _clean(_answer(lines))
    return ParsedCompletion(answer, True) if _has_words(answer) else ParsedCompletion(prompt, False)


def _without_thinking(text: str) -> str:
    """Drop reasoning; an unclosed block leaves nothing."""
    text = re.sub(r"(?i)<(/?)(?:think|thinking|thoughts?|reasoning|analysis)>", r"<\1think>", text)
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    return text.rpartition("</think>")[2].partition("<think>")[0]


def _content(text: str) -> str:
    """Return the first non-empty code fence, a JSON object's prompt or the text in tags; else all."""
    text = next(filter(_has_words, _FENCE.findall(text)), text)
    members = _MEMBER.findall(text) if "{" in text else []
    if members:
        positive = [pair for pair in members if not re.search("negative|original|input", pair[0], re.IGNORECASE)]
        prompts = [value for key, value in positive if re.search("prompt|rewrit", key, re.IGNORECASE)]
        value = next(iter(prompts or [value for _, value in positive]), "")
        try:
            return str(json.loads(f'"{value}"', strict=False))
        except ValueError:  # truncated within an escape
            return value
    tagged = (inner for _, inner in _TAGGED.findall(text) if _has_words(inner))
    return _TAG.sub("\n", next(tagged, text))


def _bare(line: str) -> str:
    """Drop marks of bold, lists and quotations."""
    line = line.replace("**", "").replace("__", "").strip()
    return line if _HEADING.match(line) else _BULLET.sub("", line)


def _answer(lines: list[str]) -> str:
    """Return the first line that is not a remark, with its continuation; after the label "Prompt:" if there is one."""
    labels = [_LABEL.match(line) for line in lines]
    labelled = [place for place, label in enumerate(labels) if label and "prompt" in label[0].lower()]
    answer = heading = ""
    for line in lines[min(labelled, default=0) :]:
        positive = _NEGATIVE.sub("", line)
        if answer and (positive != line or not answer.endswith((",", "，"))):
            break
        text = f"{answer} {line}" if answer else _announced(positive)
        if not _has_words(text) or _REMARK.match(text):
            continue
        if answer or not _leads_on(line):
            answer = text
        elif not _OPENING.match(line):
            heading = heading or text
    return _CLOSING.sub("", answer or heading)


def _leads_on(line: str) -> bool:
    """Return whether a line only announces the next one."""
    tells = _OPENING.match(line) and re.search(r"\bprompts?\b.*[.!]$", line, re.IGNORECASE)
    return bool(_HEADING.match(line) or line.endswith((":", "：")) or tells)


def _announced(line: str) -> str:
    """Drop interjections, announcements and labels before a line."""
    before = None
    while line != before:
        before = line
        for mark in (_INTERJECTION, _DISCLAIMER, _ANNOUNCEMENT, _LABEL):
            line = mark.sub("", line, count=1)
        line = line.strip()
    return line


def _clean(line: str) -> str:
    """Drop list marks, labels and quotes repeatedly."""
    while (cleaned := _unquote(_LABEL.sub("", _BULLET.sub("", " ".join(line.split()))))) != line:
        line = cleaned
    return line


def _unquote(line: str) -> str:
    """Drop enclosing quotes, or an unclosed opening quote (of a truncated answer)."""
    if not line or line[0] not in _QUOTES:
        return line
    opening, closing = line[0], _QUOTES[line[0]]
    inner = line[1:]
    if closing not in inner:
        return line if opening == "*" else inner
    end = inner.index(closing)
    # An apostrophe is not a closing quote: 'a dog's life'.
    if closing in "'’" and end < len(inner) - 1:
        end = inner.rindex(closing) if opening not in inner[:end] and inner[end + 1].isalpha() else end
    rest = inner[end + 1 :].strip()
    return inner[:end] + rest if not rest.strip(".,;") else line


def _has_words(text: str) -> bool:
    return any(character.isalnum() for character in text)
