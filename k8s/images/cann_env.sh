# shellcheck shell=bash
# Where CANN and the node's driver are; see ascend.Dockerfile for who reads it.
# shellcheck source=/dev/null
source /usr/local/Ascend/ascend-toolkit/set_env.sh
driver=/usr/local/Ascend/driver/lib64
export LD_LIBRARY_PATH="$driver/driver:$driver/common:$driver:$LD_LIBRARY_PATH"
