{{/* Bytes of a quantity that ends in Mi, Gi or Ti; the schema permits no other. */}}
{{- define "ottserve.bytes" -}}
{{- $mebi := 1048576 -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "Ti" . -}}{{- mul $number $mebi $mebi -}}
{{- else if hasSuffix "Gi" . -}}{{- mul $number 1024 $mebi -}}
{{- else -}}{{- mul $number $mebi -}}{{- end -}}
{{- end -}}

{{/* Memory of /dev/shm, twice Ray's object store of 128 MiB. */}}
{{- define "ottserve.sharedMemory" -}}256Mi{{- end -}}
{{- define "ottserve.objectStoreBytes" -}}134217728{{- end -}}

{{/* Seconds that a gateway and then its replicas may take to finish what runs. */}}
{{- define "ottserve.drainSeconds" -}}
{{- $drain := .Values.settings.gateway.drain -}}
{{- $sum := addf $drain.probe_period_s $drain.grace_s .Values.settings.deployment.grace_s -}}
{{- ceil $sum | int -}}
{{- end -}}

{{- define "ottserve.graceSeconds" -}}
{{- add .Values.lifecycle.preStopSeconds (include "ottserve.drainSeconds" .) .Values.lifecycle.marginSeconds 1 -}}
{{- end -}}

{{/* Refuse values that contradict each other, naming both. */}}
{{- define "ottserve.check" -}}
{{- $settings := .Values.settings -}}
{{- include "ottserve.checkPorts" . -}}
{{- if and (eq .Values.mode "pod") (gt (include "ottserve.maxReplicas" . | int) 1) -}}
{{- fail (printf "mode=pod, settings.deployment.num_replicas=%v, settings.deployment.autoscale.max_replicas=%v: a pod is one replica; take mode=rayservice for more" $settings.deployment.num_replicas (include "ottserve.maxReplicas" .)) -}}
{{- end -}}
{{- if and (eq $settings.model.device "cuda") (eq (int .Values.replica.gpus) 0) -}}
{{- fail "settings.model.device=cuda, replica.gpus=0: a replica needs a GPU" -}}
{{- end -}}
{{- if and (eq $settings.model.device "cpu") (gt (int .Values.replica.gpus) 0) -}}
{{- fail (printf "settings.model.device=cpu, replica.gpus=%v: nobody would use the GPU" .Values.replica.gpus) -}}
{{- end -}}
{{- $ranks := include "ottserve.ranks" . | int -}}
{{- if and (gt (int .Values.replica.gpus) 0) (ne (int .Values.replica.gpus) $ranks) -}}
{{- fail (printf "settings.model.tensor_parallel=%v, replica.gpus=%v: each rank has a GPU of its own" $ranks .Values.replica.gpus) -}}
{{- end -}}
{{- $cores := mulf (default (divf .Values.replica.cpus $ranks) $settings.deployment.num_cpus) $ranks -}}
{{- if gt (float64 $cores) (float64 .Values.replica.cpus) -}}
{{- fail (printf "settings.deployment.num_cpus=%v, replica.cpus=%v: a replica would never be placed" $cores .Values.replica.cpus) -}}
{{- end -}}
{{- $gpus := mulf (default (divf .Values.replica.gpus $ranks) $settings.deployment.num_gpus) $ranks -}}
{{- if gt (float64 $gpus) (float64 .Values.replica.gpus) -}}
{{- fail (printf "settings.deployment.num_gpus=%v, replica.gpus=%v: a replica would never be placed" $gpus .Values.replica.gpus) -}}
{{- end -}}
{{- include "ottserve.checkMemory" . -}}
{{- end -}}

{{/* Ranks of a replica, all in its pod. */}}
{{- define "ottserve.ranks" -}}
{{- dig "model" "tensor_parallel" 1 .Values.settings -}}
{{- end -}}

{{/* Every server of a pod listens on a port of its own. */}}
{{- define "ottserve.checkPorts" -}}
{{- $gateway := .Values.settings.gateway -}}
{{- $ports := dict "settings.gateway.port" $gateway.port "settings.gateway.metrics.port" $gateway.metrics.port "settings.metrics.port" .Values.settings.metrics.port -}}
{{- with $gateway.http_port -}}{{- $_ := set $ports "settings.gateway.http_port" . -}}{{- end -}}
{{- if include "ottserve.tls" . -}}{{- $_ := set $ports "settings.gateway.tls.health_port" (include "ottserve.healthPort" .) -}}{{- end -}}
{{- range $name, $port := $ports -}}
{{- range $other, $same := omit $ports $name -}}
{{- if eq (toString $port) (toString $same) -}}{{- fail (printf "%s=%v, %s=%v: two servers need two ports" $name $port $other $same) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Bytes that a replica needs of its pod at least. On a CPU weights and cache lie there. */}}
{{- define "ottserve.memoryNeeded" -}}
{{- $ranks := include "ottserve.ranks" . | int64 -}}
{{- $held := 0 -}}
{{- if eq (int .Values.replica.gpus) 0 -}}
{{- $held = add (include "ottserve.bytes" .Values.replica.weights) (mul $ranks (include "ottserve.cacheBytes" .)) -}}
{{- end -}}
{{- add $held (include "ottserve.bytes" (include "ottserve.sharedMemory" .)) (mul $ranks 1073741824) -}}
{{- end -}}

{{/* Of each rank: 2 GiB unless told, and 0 where it is told as a number of pages, whose size the model alone tells. */}}
{{- define "ottserve.cacheBytes" -}}
{{- $cache := default dict .Values.settings.cache -}}
{{- ternary (default 2147483648 $cache.memory_bytes | int64) 0 (empty $cache.num_pages) -}}
{{- end -}}

{{- define "ottserve.checkMemory" -}}
{{- $needed := include "ottserve.memoryNeeded" . | int64 -}}
{{- if lt (include "ottserve.bytes" .Values.replica.memory | int64) $needed -}}
{{- fail (printf "replica.memory=%s, replica.weights=%s: weights, /dev/shm, and 1 GiB for the program and the cache of each rank need %v bytes" .Values.replica.memory .Values.replica.weights $needed) -}}
{{- end -}}
{{- end -}}
