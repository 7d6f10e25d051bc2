.PHONY: check test slow nightly golden docs same results site release-check

check:  ## lint, format, types, and the structure of the code (tests/test_layout.py)
	ruff check . && ruff format --check . && mypy && pyright && pytest -q -n 0 tests/test_layout.py

test:  ## the fast suite
	pytest

slow:  ## what CI runs after it
	pytest -m "(slow or needs) and not nightly"

nightly:  ## measurements and sweeps, one at a time; results/nightly.csv keeps what each last showed
	pytest -m nightly -n 0 -o faulthandler_timeout=3700 --record results/nightly.csv

docs:  ## write docs/zoo.md, docs/balance.md, their pages and what `fusionzoo zoo` shows from the registries, and the figures in docs/which.md from results/
	python docs/make.py

site:  ## build the site into build/site (pip install -e '.[docs]')
	python docs/website.py

golden:  ## write the golden numbers of one fusion: make golden NAME=gmu
	python tests/golden/make.py $(NAME)

# Where this branch left main, so that all its changes are compared; HEAD~1 where there is no such place.
REV ?= $(shell git merge-base HEAD origin/main 2>/dev/null || echo HEAD~1)
same:  ## compare training with an older revision, bit for bit: make same REV=HEAD~3
	python perf/same_losses.py $(REV)

results:  ## say which tables in results/ are older than their code; rerun some: make results ARGS='--run digits'
	python tests/helpers/results.py $(ARGS)

TAG ?= $(shell git tag --points-at HEAD 2>/dev/null | head -n 1)
release-check: export OFFLINE = 1
release-check:  ## run the steps of a release as far as no network is needed, with this environment's libraries
	.ci/release version $(TAG)
	rm -rf dist && .ci/release build dist
	.ci/release try dist/*.whl
