"""``POST /classify``: a probability for each label of each input."""

import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from rustvllm.server.answers.scores import classification_response
from rustvllm.server.endpoints.pooling.call import PooledCall
from rustvllm.server.endpoints.pooling.embeddings import prompts_of
from rustvllm.server.schemas.refusals import CLASSIFICATION_REFUSALS
from rustvllm.server.schemas.request_body import at_size, read_request, refuse_unbuilt
from rustvllm.server.schemas.scoring import ClassificationRequest


async def classify(raw_request: Request) -> Response:
    """Classify each input; each is a request of its own for the engine."""
    request = await read_request(raw_request, ClassificationRequest)
    call = await PooledCall.begin(raw_request, request, "classify", "classify-")
    refuse_unbuilt(request, CLASSIFICATION_REFUSALS)
    prompts = await at_size(raw_request, partial(prompts_of, request))
    probs, usage = await call.run(prompts, "input")
    classifier = call.model.classifier
    assert classifier is not None, "only classifiers get here"
    header = {"id": call.request_id, "object": "list", "created": int(time.time()), "model": call.name}
    return await classification_response(probs, classifier, header, usage)
