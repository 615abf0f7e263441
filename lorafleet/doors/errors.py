"""What an error holds of the call that it ends."""


def let_go(error: BaseException) -> None:
    """Lets go of all that the frames hold which it went through, and those that led to it: the request first
    of all.

    A call that ends with an error waits until that is sent, and gRPC's books keep the error until a full
    collection.
    """
    led: BaseException | None = error
    while led is not None:
        led.__traceback__ = None
        before = led.__cause__ or led.__context__
        led.__cause__ = led.__context__ = None
        led = before
