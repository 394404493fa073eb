# Every target is `python tasks.py NAME`; that is also what to type where there is no make.
# ARGS="--device cpu --tiny" makes `gpu` a dry run; ARGS="--port 9000" is for `serve`.
PYTHON ?= python3

.DEFAULT_GOAL := help
.PHONY: run test lab serve ray quick gpu bench notebooks figures clean help

run test lab serve ray quick gpu bench notebooks figures clean help:
	@$(PYTHON) tasks.py $@ $(ARGS)
