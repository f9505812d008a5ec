"""The server: gRPC on the outside, one thread that drives an `engine.Engine` on the inside.

    client -> service (asyncio) -> admission -> worker queue -> engine thread
    client <- detokeniser      <- per-request inbox <- events  <-

`main.run` starts it from a config, `client.Client` talks to it.
"""
