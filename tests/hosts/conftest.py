import pytest

from fusion.npu import open_device
from stalesync.job.base_model import make_base_model


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A model that adds up one digit right now and then."""
    folder = tmp_path_factory.mktemp("base")
    make_base_model("addition", folder, open_device("emulated"), target=0.05)
    return folder
