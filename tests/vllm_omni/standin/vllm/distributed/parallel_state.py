"""The tensor parallel group of this process."""

_TP = None


def get_tp_group():
    assert _TP is not None, "there is no tensor parallel group"
    return _TP
