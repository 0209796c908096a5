"""A gateway process to be killed: submits endless sequences, says so, and reads until it dies.

Arguments: address, gateway id, number of sequences, tokens that their lease covers. Prints one line for each
sequence once its first token has arrived.
"""

from __future__ import annotations

import asyncio
import sys

from engine.client.client import EngineClient
from engine.client.stream import EngineStream
from tests.support.engine_process import sequence

ENDLESS_TOKENS = 8000


async def main(address: str, gateway_id: str, num_sequences: int, lease_tokens: int) -> None:
    client = EngineClient(address, gateway_id)
    await client.connect()
    streams = [
        client.submit(
            sequence(ENDLESS_TOKENS, lease_tokens=lease_tokens, sequence_id=f"{gateway_id}-{index}")
        )
        for index in range(num_sequences)
    ]
    await asyncio.gather(*(read(stream) for stream in streams))


async def read(stream: EngineStream) -> None:
    announced = False
    async for _ in stream:
        if not announced:
            print(stream.sequence_id, flush=True)
            announced = True


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
