.PHONY: check test slow golden

check:  ## lint, format, types
	ruff check . && ruff format --check . && mypy

test:  ## the fast suite
	pytest

slow:  ## minutes rather than seconds
	pytest -m slow

golden:  ## write the golden numbers of one fusion: make golden NAME=gmu
	python tests/golden/make.py $(NAME)
