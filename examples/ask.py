"""Ask a running server one question through the official `openai` client, streamed.

python examples/ask.py "What is the capital of France?"
"""

from __future__ import annotations

import argparse
import sys
import time
import urllib.error
import urllib.request

from openai import OpenAI


def wait_until_ready(url: str, limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError) as error:
            if time.monotonic() > deadline_s:
                sys.exit(f"no server is ready at {url}: {error}; start one with `headrace serve smollm2`")
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--wait", type=float, default=10.0, help="seconds to wait for the server")
    args = parser.parse_args()
    url = f"http://{args.host}:{args.port}"
    wait_until_ready(url, args.wait)
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": args.question}],
        max_tokens=100,
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
