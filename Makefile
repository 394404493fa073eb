# Every target is `python tasks.py NAME`; that is also what to type where there is no make.
# ARGS="--device cpu --tiny" makes `gpu` a dry run.
PYTHON ?= python3

.DEFAULT_GOAL := help
.PHONY: run test lab quick gpu bench notebooks figures clean help

run test lab quick gpu bench notebooks figures clean help:
	@$(PYTHON) tasks.py $@ $(ARGS)
