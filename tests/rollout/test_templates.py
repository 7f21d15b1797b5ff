"""A chat template is a stranger's program, which runs in Jinja's sandbox."""

import pytest

from rollout.templates import render

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for", "unexpected 'end of template'"),
        ("{{ messages.nothing.deep }}", "has no attribute 'nothing'"),
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append('x') }}", "unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError: maximum recursion depth"),
        ("{{ raise_exception('y' * 1000) }}", "^y{300}$"),
    ],
)
def test_what_is_wrong_with_a_template_is_said(template, problem):
    with pytest.raises(ValueError, match=problem):
        render(template, MESSAGES, None)
