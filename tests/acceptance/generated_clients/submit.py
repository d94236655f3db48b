"""Submit a command with the generated client, and wait for its end: submit.py URL."""

import os
import sys

from pyclient import AuthenticatedClient
from pyclient.api.requests import get_request, submit_request
from pyclient.models import Descriptor, RequestOut

client = AuthenticatedClient(base_url=sys.argv[1], token=os.environ["ROUNDHOUSE_KEY"], timeout=None)
body = Descriptor.from_dict({"tasks": [{"name": "t", "run": {"command": ["true"]}}]})
request = submit_request.sync(client=client, body=body)
while isinstance(request, RequestOut) and request.state in ("queued", "running"):
    request = get_request.sync(request.id, client=client, wait="3s")
assert isinstance(request, RequestOut), request
sys.stdout.write(request.state)
