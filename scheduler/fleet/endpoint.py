"""Where an executor is reached, and the name it is known by."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`address` is host:port, with brackets around the host of IPv6, or what else gRPC resolves. `pod` is the
    executor's own name; "": it is known by its address. `tls_name` is looked for in its certificate; "": the
    address's host."""

    address: str
    pod: str = ""
    tls_name: str = ""

    @property
    def name(self) -> str:
        """What is kept of the executor is kept by this."""
        return self.pod or self.address
