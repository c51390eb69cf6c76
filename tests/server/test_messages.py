"""Roles of messages: OpenAI's, and those that a template names."""

from __future__ import annotations

import pytest

from headrace.front.errors import RequestError
from headrace.server.messages import check_roles


def test_roles() -> None:
    known = [{"role": role, "content": "a"} for role in ("system", "developer", "user", "assistant", "tool")]
    check_roles(known, "")
    check_roles([{"role": "ipython", "content": "a"}], "{% if m.role == 'ipython' %}")
    with pytest.raises(RequestError, match=r"messages\[5\]\.role is 'asistant'") as caught:
        check_roles([*known, {"role": "asistant", "content": "a"}], "{% if m.role == 'ipython' %}{% endif %}")
    assert caught.value.param == "messages"
