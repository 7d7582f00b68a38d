#!/bin/sh
# Install healthd from this folder, without a network, into its own environment.
#
#   ./install.sh /opt/healthd             with the python3 of PATH
#   ./install.sh /opt/healthd python3.12  with another Python
#
# It needs nothing but Python: neither pip nor ensurepip. TESTS=1 also installs pytest, for the tests on accelerators.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:?"install.sh: name the folder of the environment, such as /opt/healthd"}
python=${2:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "install.sh: $python: healthd needs Python 3.11 or newer; name one as the second argument" >&2
    exit 1
}
# The wheels of compiled packages name their Python, as msgspec-...-cp312-...whl does.
wanted=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
set -- "$here"/wheels/msgspec-*-"$wanted"-*.whl
[ -e "$1" ] || {
    has=$(ls "$here"/wheels/msgspec-*.whl | sed 's/.*-cp3\([0-9]*\)-cp.*/3.\1/')
    echo "install.sh: this bundle is for Python $has, and $python is another: name that Python, or build a bundle for it" >&2
    exit 1
}
(cd "$here" && sha256sum --quiet --check SHA256SUMS) || {
    echo "install.sh: files of this bundle differ from SHA256SUMS: copy it again" >&2
    exit 1
}
"$python" -m venv --without-pip "$target"
bin=$target/bin
pip=$(ls "$here"/wheels/pip-*.whl)/pip # a wheel is an archive that Python runs
install() { "$bin/python" "$pip" install --quiet --no-index --no-cache-dir --find-links "$here/wheels" "$@"; }
install pip "$here"/wheels/healthd-*.whl
# What the extras add, as far as this bundle has it.
for name in nvidia_ml_py grpcio psycopg psycopg_binary boto3 asn1crypto cryptography tenacity fsspec s3fs; do
    set -- "$here"/wheels/"$name"-*.whl
    [ ! -e "$1" ] || install "$1"
done
[ -z "${TESTS:-}" ] || install pytest pytest-timeout anyio hypothesis
"$bin/healthd" --version
echo "installed into $target. Next:"
echo "  export PATH=$bin:\$PATH HEALTHD_PROBE_PYTHON=/path/of/the/python/of/your/jobs"
echo "  healthd doctor"
