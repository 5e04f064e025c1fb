"""A Hugging Face model: what is said when there is none."""

import pytest
from huggingface_hub import constants

from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.tasks.arithmetic import Arithmetic


def test_a_name_on_a_hub_that_cannot_be_reached_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "ftp_proxy"):
        monkeypatch.delenv(proxy, raising=False)
    with pytest.raises(UserError, match=r"'some/model' is no folder here .*127\.0\.0\.1 cannot be reached"):
        HuggingFace(path="some/model").prepared(Arithmetic())
