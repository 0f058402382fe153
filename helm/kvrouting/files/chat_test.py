"""Sends the same chat request twice through the router of a pool; fails unless both are answered.

Usage: chat_test.py URL MODEL TIMEOUT_S, with the API key, if there is one, in KVROUTING_TEST_API_KEYS.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

PROMPT = "Name three things that a cache is good for, and say of each in one sentence why that is so. " * 4


def chat(url, model):
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    keys = os.environ.get("KVROUTING_TEST_API_KEYS", "").split()
    if keys:
        request.add_header("Authorization", f"Bearer {keys[0]}")
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def answered(url, model, deadline_s):
    """Asks again while the pool is starting: 503, or nobody who answers."""
    while True:
        try:
            return chat(url, model)
        except urllib.error.HTTPError as error:
            reason = f"{error.code}: {error.read().decode(errors='replace')}"
            if error.code != 503:
                sys.exit(f"{url} answers {reason}")
        except OSError as error:
            reason = str(error)
        if time.monotonic() > deadline_s:
            sys.exit(f"{url} does not serve: {reason}")
        time.sleep(1)


def main():
    url, model, timeout_s = sys.argv[1:]
    deadline_s = time.monotonic() + float(timeout_s)
    for attempt in ("first", "second"):
        answer = answered(url, model, deadline_s)
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not answer["choices"][0]["message"]["content"]:
            sys.exit(f"{url}: the {attempt} answer is empty")
        print(f"{url} {attempt}: {usage['prompt_tokens']} prompt tokens, {cached} of them from the cache")


main()
