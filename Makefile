.PHONY: check test slow golden docs

check:  ## lint, format, types
	ruff check . && ruff format --check . && mypy

test:  ## the fast suite
	pytest

slow:  ## minutes rather than seconds
	pytest -m slow

docs:  ## write docs/zoo.md and docs/balance.md from the registries, and the figures in docs/which.md from results/
	python docs/make.py

golden:  ## write the golden numbers of one fusion: make golden NAME=gmu
	python tests/golden/make.py $(NAME)
