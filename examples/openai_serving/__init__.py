"""The parts of ``examples/openai_server.py``.

``wire``     what a client may ask, and the words of the answers: OpenAI's JSON
``text``     prompts to tokens, and committed tokens to text that can be sent
``service``  an ask becomes requests of the scheduler, and their streams become an answer
``monitor``  what operators see: state, rates, percentiles, metrics
``app``      HTTP: routes, limits, who may come in, who has hung up
"""
