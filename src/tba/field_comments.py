"""The comments after a dataclass's fields, which the command line's help and the page of settings show.

Invariant: nothing is written twice; a field is explained where it is defined and nowhere else.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import tokenize
from io import StringIO

_MARK = re.compile(r"#\s*(noqa: [A-Z0-9, ]+ - )?")  # what begins a comment, possibly after a remark to the linter


def comments(kind: type) -> dict[str, str]:
    """Returns field -> the comment after it, with the comment lines that follow; empty without the source."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except OSError:  # made in a console
        return {}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    fields = [
        (s.lineno, s.target.id) for s in body.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
    ]
    ends = [line - 1 for line, _ in fields[1:]] + [max((line for line, _ in fields), default=0)]
    by_line = {
        t.start[0]: _MARK.sub("", t.string, count=1).strip()
        for t in tokenize.generate_tokens(StringIO(source).readline)
        if t.type == tokenize.COMMENT
    }
    own_line = [n for n, line in enumerate(source.splitlines(), 1) if line.strip().startswith("#")]
    said = {}
    for (line, name), end in zip(fields, ends, strict=True):
        while end + 1 in own_line:
            end += 1
        said[name] = " ".join(by_line[n] for n in range(line, end + 1) if n in by_line)
    return said
