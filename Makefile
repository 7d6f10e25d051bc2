.PHONY: check test slow nightly nightly-status golden docs same results site release-check night-passed release-steps

check:  ## lint, format, types, and the structure and names of the code; two minutes
	ruff check . && ruff format --check . && mypy && pyright && pytest -q tests/test_layout.py tests/test_names.py

test:  ## the fast suite; eight minutes
	pytest

slow:  ## all slow tests; half an hour
	pytest -m "(slow or needs) and not nightly"

MINUTES ?= 20
nightly:  ## everything that .ci/run leaves out, in parts of MINUTES, the most due first; kept in results/nightly.csv
	cd tests && python -m helpers.nightly run --minutes $(MINUTES)

nightly-status:  ## say what of it has not passed since which commit
	cd tests && python -m helpers.nightly status

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
release-check: night-passed release-steps  ## refuse where the night failed or is a week old; run the steps of a release as far as no network is needed, with this environment's libraries

night-passed:
	cd tests && python -m helpers.nightly status --check

release-steps: export OFFLINE = 1
release-steps:
	.ci/release version $(TAG)
	rm -rf dist && .ci/release build dist
	.ci/release models dist/models
	.ci/release try dist/*.whl
