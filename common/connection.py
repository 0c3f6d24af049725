"""How a role comes to its broker: it waits for a server that is not there yet."""

from __future__ import annotations

import asyncio

from common.broker import Broker
from common.config import Config
from common.errors import ServerAwayError
from common.patience import Patience
from common.startup import redis_url


async def connect(config: Config) -> Broker:
    """This role's connection: roles and server may be started in any order.

    Raises:
        ConfigError: the address of the server is missing or wrong.
        BrokerError: no server came for redis.patience_s, or waiting would not help.
    """
    url, settings = redis_url(config), config.redis
    wait = Patience(settings.patience_s).begin("connecting")
    while True:
        try:
            broker = await Broker.connect(
                url, config.run.name, settings.lease_s, settings.patience_s
            )
        except ServerAwayError as error:
            pause = wait.again("it is not there", error)
        else:
            wait.over()
            return broker
        await asyncio.sleep(pause)
