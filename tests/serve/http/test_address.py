"""The server's address."""

import socket

import pytest

from octile.serve.http.address import bind, listen, url_of


def test_an_address_in_use_is_refused():
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 cannot be used: Address already in use"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1"])  # one that is reserved for documents
def test_a_host_that_is_no_address_of_this_machine_is_refused(host):
    with pytest.raises(ValueError, match=f"host '{host}' is not an address of this machine"):
        bind(host, 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_the_url_of_an_ipv6_address():
    with bind("::1", 0) as bound:
        assert url_of(bound) == f"http://[::1]:{bound.getsockname()[1]}"


def test_an_address_at_which_another_server_listens_meanwhile_is_refused():
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", port := first.getsockname()[1]) as second:
        listen(first)
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 cannot be used: Address already in use"):
            listen(second)
