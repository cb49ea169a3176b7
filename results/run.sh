#!/bin/sh
# Run the experiments of results/order.txt that have no records yet, and add them to the records and pages of this tree.
#
# The runs use a clone of HEAD in .results/ with its own .venv, so that a tree under edit is never imported. They have
# low priority and one thread, and the same command resumes them. RESULTS_ORDER names another list of experiments.
# RESULTS_PYTHON is a Python that has the dependencies already; no .venv is made then.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
clone=$root/.results
order=${RESULTS_ORDER:-$root/results/order.txt}

if [ -n "$(git -C "$root" status --porcelain --untracked-files=no)" ]; then
    echo "uncommitted changes are not used; running commit $(git -C "$root" rev-parse --short HEAD)"
fi
[ -d "$clone/.git" ] || git clone --quiet --no-checkout "$root" "$clone"
git -C "$clone" fetch --quiet "$root" HEAD
git -C "$clone" checkout --quiet --force --detach FETCH_HEAD

unset PYTHONPATH
if [ -n "${RESULTS_PYTHON:-}" ]; then
    export PYTHONPATH="$clone/src"
    python=$RESULTS_PYTHON
else
    make -C "$clone" --no-print-directory .venv/ready
    python=$clone/.venv/bin/python
fi
ghostnoise() {
    nice -n 19 "$python" -m ghostnoise "$@"
}

# Adds finished runs to the records, and rebuilds the pages. A page with a mistake must not stop the runs.
publish() {
    cd "$clone/runs" 2>/dev/null || return 0
    set -- *
    cd "$root"
    ghostnoise runs export "$@" --runs "$clone/runs" || echo "the records were not extended"
    ghostnoise results || echo "the pages were not rebuilt; correct the mistake and run ghostnoise results"
    cd "$clone"
}

cd "$clone"
set -- "$root"/results/*/records.jsonl
[ ! -e "$1" ] || ghostnoise runs import "$@" --runs "$clone/runs"
while read -r words; do
    case $words in '' | '#'*) continue ;; esac
    echo "ghostnoise sweep $words"
    code=0
    eval "ghostnoise sweep $words --runs runs --workers 1 --threads 1" </dev/null || code=$?
    publish
    case $code in
    0 | 1 | 2) ;; # all finished; some failed; the data or the recipe are missing: the line above names the reason
    *) exit "$code" ;;
    esac
done <"$order"
