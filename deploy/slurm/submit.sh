#!/bin/bash
# Submit a whole run, or go on with one: server, learner, verifiers, generators, and a last job that
# audits it and ends what is left. See deploy/README.md.
set -euo pipefail

usage() {
    cat >&2 <<'TEXT'
usage: submit.sh RECIPE [--generators N] [--verifiers N] [--nodes N] [--ranks N] [--only ROLE]
  --generators N   generators to start (default 1)
  --verifiers N    verifiers to start (default 1)
  --nodes N        nodes of the learner (default 1)
  --ranks N        ranks of the learner on each node (default 1)
  --only ROLE      submit only `generator` or `verifier`: more of them for a run that is there
Variables:
  DAPO_SBATCH, DAPO_SBATCH_LEARNER, …_GENERATOR, …_VERIFIER, …_SERVER: options of sbatch for all or
  one, such as DAPO_SBATCH_GENERATOR='--gpus=1 --cpus-per-task=8 --time=12:00:00'
  DAPO_REDIS_URL: a server of your own, as redis.url of the recipe is one; none is submitted then
TEXT
    exit 2
}
die() { echo "submit: $*" >&2; exit 2; }

recipe='' generators=1 verifiers=1 nodes=1 ranks=1 only=''
while [ $# -gt 0 ]; do
    case $1 in
    --generators | --verifiers | --nodes | --ranks)
        [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "$1 takes a number from 1"
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
    --only)
        case ${2:-} in generator | verifier) ;; *) die '--only takes generator or verifier' ;; esac
        only=$2
        shift 2
        ;;
    -*) usage ;;
    *)
        [ -z "$recipe" ] || usage
        recipe=$1
        shift
        ;;
    esac
done
[ -n "$recipe" ] || usage
[ -r "$recipe" ] || die "$recipe cannot be read"

DAPO_HOME=$(cd "$(dirname "$0")/../.." && pwd)
DAPO_RECIPE=$(realpath "$recipe")
facts=$("$DAPO_HOME/.venv/bin/python" - "$DAPO_RECIPE" <<'PY'
import sys
from pathlib import Path

from common.config import load_config
from common.errors import DapoError

try:
    config = load_config(Path(sys.argv[1]))
    print(config.run_dir.resolve(), config.redis.url or "", sep="\n")
except DapoError as error:
    sys.exit(f"submit: {error}")
PY
) || exit 2
{ read -r DAPO_RUN && read -r server_of_recipe; } <<<"$facts" || true
DAPO_STATE="$DAPO_RUN/slurm"
export DAPO_HOME DAPO_RECIPE DAPO_RUN DAPO_STATE DAPO_RANKS=$ranks
run=$(basename "$DAPO_RUN")
mkdir -p "$DAPO_STATE" "$DAPO_RUN/logs"

# job ROLE [OPTION…]: submit a script, print the job's number
job() {
    local role=$1 extra="DAPO_SBATCH_${1^^}"
    shift
    # options are words
    # shellcheck disable=SC2086
    sbatch --parsable --job-name="dapo-$role-$run" --output="$DAPO_RUN/logs/slurm-$role-%j.out" \
        "$@" ${DAPO_SBATCH:-} ${!extra:-} "$DAPO_HOME/deploy/slurm/$role.sbatch"
}

if [ -n "${DAPO_REDIS_URL:-$server_of_recipe}" ]; then
    export DAPO_SERVER_GIVEN=1 DAPO_REDIS_PASSWORD_FILE=${DAPO_REDIS_PASSWORD_FILE:-}
fi

if [ -n "$only" ]; then
    count="${only}s"
    echo "$only $(job "$only" --array="1-${!count}")"
    exit
fi

busy=$(squeue --noheader --name="dapo-learner-$run" --user="$(id -un)" --format=%i)
[ -z "$busy" ] || die "run $run is in the queue already (job ${busy//$'\n'/ })"

after=()
if [ -z "${DAPO_SERVER_GIVEN:-}" ]; then
    rm -f "$DAPO_STATE/address"
    # a run that goes on after its end: its old server would send the new workers home at once
    [ ! -e "$DAPO_RUN/ended.json" ] || rm -rf "$DAPO_STATE/server"
    (umask 077 && head -c 24 /dev/urandom | base64 | tr '+/' '-_' >"$DAPO_STATE/password")
    server=$(job server)
    echo "server $server"
    after=(--dependency="after:$server")
fi
learner=$(job learner --nodes="$nodes" "${after[@]}")
echo "learner $learner"
echo "verifier $(job verifier --array="1-$verifiers" "${after[@]}")"
echo "generator $(job generator --array="1-$generators" "${after[@]}")"
echo "finish $(job finish --dependency="afterany:$learner")"
