"""`verl serve`: a model behind the HTTP interfaces that agents and evaluations speak.

`draws` owns the engine's thread, `served_model` makes prompts of requests and messages of tokens; each interface is one
module over these two, and `app` joins them. starlette and uvicorn (extra `serve`) are imported by what `app` imports
only.
"""
