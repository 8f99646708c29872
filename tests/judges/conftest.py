"""One thread, because products of tiny pipelines are slower with several."""

import pytest


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
