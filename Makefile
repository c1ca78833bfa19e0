bin := .venv/bin
sources := disagg_router connectors policies examples helm tests .ci

.PHONY: help setup demo test test-long test-helm bench-mixed bench-decision grid lint format clean

help:
	@echo "make setup    .venv with everything pinned, and the tiny model in ./model"
	@echo "make demo     1 prefill + 1 decode + the router on this machine's CPU, two requests, a comparison"
	@echo "make test     lint, then all tests, those on real engines included"
	@echo "make test-long  what takes minutes more: every death case on a Ray with stand-ins for the engines"
	@echo "make test-helm  the chart, the image's build file and their examples, rendered and checked with the real helm"
	@echo "make bench-mixed  half an hour: break_even against the other policies, on four engines on this machine's CPU"
	@echo "make bench-decision  the CPU time of one decision, part by part"
	@echo "make grid     hours: break_even against the best fixed configuration in 48 simulated cells; QUICK=1 takes minutes"
	@echo "make lint     ruff, mypy, pyright"
	@echo "make format   let ruff rewrite the sources"
	@echo "make clean    remove what the other targets made"

setup:
	@.ci/setup

demo: setup
	@$(bin)/python examples/local-cpu/demo.py

test: lint
	@$(bin)/pytest -m "not long and not helm"

test-long: setup
	@$(bin)/pytest -m long

test-helm: setup
	@$(bin)/pytest tests/helm -m "not long"

bench-mixed: setup
	@$(bin)/python -m disagg_router.bench.mixed

bench-decision: setup
	@$(bin)/python -m disagg_router.bench.decision

grid: setup
	@$(bin)/python -m disagg_router.sim.grid

lint: setup
	$(bin)/ruff check $(sources)
	$(bin)/ruff format --check $(sources)
	$(bin)/mypy
	$(bin)/pyright --pythonpath $(bin)/python

format: setup
	$(bin)/ruff check --fix $(sources)
	$(bin)/ruff format $(sources)

clean:
	rm -rf .venv model .state build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find disagg_router connectors policies examples helm tests .ci -name __pycache__ -type d -prune -exec rm -rf {} +
