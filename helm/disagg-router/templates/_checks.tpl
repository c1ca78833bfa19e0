{{/* What the schema cannot say: values that are right alone and wrong together. Each is one sentence that says what to do. */}}
{{- define "dr.checks" -}}
{{- $v := .Values }}{{ $config := $v.config }}{{ $limits := $config.limits | default dict }}{{ $engine := $config.engine | default dict -}}
{{- $pools := $config.pools | default dict -}}
{{- if and (eq $v.mode "proxy") (not $config.fleet) }}
  {{- fail "config.fleet is missing: in mode proxy name the vLLM servers that run already, under config.fleet.kubernetes, static or file" }}
{{- end }}
{{- if and (eq $v.mode "proxy") $pools }}
  {{- fail "config.pools asks for engines, which mode proxy does not start: set config.pools to null, or mode to plain or kuberay" }}
{{- end }}
{{- if and (ne $v.mode "proxy") $config.fleet }}
  {{- fail (printf "config.fleet is only for mode proxy: in mode %s the router asks the controller, so remove config.fleet" $v.mode) }}
{{- end }}
{{- if and (ne $v.mode "proxy") (not $pools) }}
  {{- fail "config.pools is empty: name prefill and decode, or unified, with their number of instances, or set mode to proxy" }}
{{- end }}
{{- if and (hasKey $pools "prefill") (not (or (hasKey $pools "decode") (hasKey $pools "unified"))) }}
  {{- fail "config.pools has prefill but nothing that decodes: add config.pools.decode or config.pools.unified" }}
{{- end }}
{{- if and (hasKey $pools "prefill") (not ($config.connector | default (dict "name" "nixl")).name) }}
  {{- fail "config.pools has prefill but config.connector.name is empty: name the connector that moves the KV to decode, for example nixl" }}
{{- end }}
{{- if and (hasKey $pools "decode") (not ($config.connector | default (dict "name" "nixl")).name) }}
  {{- fail "config.pools has decode but config.connector.name is empty: name the connector that brings it KV, for example nixl, or use config.pools.unified alone" }}
{{- end }}
{{- range $role, $pool := $pools }}
  {{- if and (eq ($engine.device | default "cuda") "cuda") (not $pool.gpus) }}
    {{- fail (printf "config.pools.%s.gpus is 0 but config.engine.device is cuda: give each instance at least one GPU, or set the device to cpu" $role) }}
  {{- end }}
  {{- if and (eq ($engine.device | default "cuda") "cpu") $pool.gpus }}
    {{- fail (printf "config.pools.%s.gpus is %d but config.engine.device is cpu: set gpus to 0" $role ($pool.gpus | int64)) }}
  {{- end }}
{{- end }}
{{- range $role, $pool := $v.pools }}
  {{- if and $pool (not (hasKey $pools $role)) }}
    {{- fail (printf "pools.%s has settings but config.pools has no %s: add it there, or remove them here" $role $role) }}
  {{- end }}
{{- end }}
{{- if ($config.router | default dict).admin_token }}
  {{- fail "config.router.admin_token would stand readable in a ConfigMap: use secrets.adminToken or secrets.existing" }}
{{- end }}
{{- if and $v.secrets.existing (or $v.secrets.rayToken $v.secrets.adminToken $v.secrets.hfToken) }}
  {{- fail "secrets.existing names a Secret, so rayToken, adminToken and hfToken have no place to go: remove them, or secrets.existing" }}
{{- end }}
{{- $drain := add (ceil ($limits.drain_s | default 15)) $v.router.preStopSeconds 5 }}
{{- if le ($v.router.terminationGracePeriodSeconds | int64) ($drain | int64) }}
  {{- fail (printf "router.terminationGracePeriodSeconds is %d, which cuts the drain: make it more than preStopSeconds + config.limits.drain_s + 5 = %d" ($v.router.terminationGracePeriodSeconds | int64) ($drain | int64)) }}
{{- end }}
{{- if and $v.router.autoscaling.enabled (gt ($v.router.autoscaling.minReplicas | int64) ($v.router.autoscaling.maxReplicas | int64)) }}
  {{- fail "router.autoscaling.minReplicas is more than maxReplicas: swap them" }}
{{- end }}
{{- if ne $v.mode "proxy" }}
  {{- $stop := add (ceil ($engine.stop_grace_s | default 5)) 30 }}
  {{- if le ($v.head.terminationGracePeriodSeconds | int64) ($stop | int64) }}
    {{- fail (printf "head.terminationGracePeriodSeconds is %d, which kills engines that are being stopped: make it more than config.engine.stop_grace_s + 30 = %d" ($v.head.terminationGracePeriodSeconds | int64) ($stop | int64)) }}
  {{- end }}
  {{- if and (hasPrefix "/" ($config.model.path | default "")) (not $v.head.mountCache) (not $v.head.extraVolumeMounts) }}
    {{- fail (printf "config.model.path %s is a folder, whose config.json the controller reads: set head.mountCache, or mount it with head.extraVolumes" $config.model.path) }}
  {{- end }}
{{- end }}
{{- range $role := include "dr.roles" . | fromJsonArray }}
  {{- $pool := include "dr.pool" (list $ $role) | fromJson }}
  {{- $stop := add $pool.preStopSeconds (ceil ($engine.stop_grace_s | default 5)) 8 }}
  {{- if le ($pool.terminationGracePeriodSeconds | int64) ($stop | int64) }}
    {{- fail (printf "terminationGracePeriodSeconds of pool %s is %d, which kills an engine that is being stopped: make it more than preStopSeconds + config.engine.stop_grace_s + 8 = %d" $role ($pool.terminationGracePeriodSeconds | int64) ($stop | int64)) }}
  {{- end }}
  {{- if and $pool.hostNetwork $v.networkPolicy.enabled (not $v.networkPolicy.nodeCidrs) }}
    {{- fail (printf "pool %s has hostNetwork, so what it sends comes from its node's address, which the network policy would refuse: list the nodes' addresses in networkPolicy.nodeCidrs, or set networkPolicy.enabled to false" $role) }}
  {{- end }}
  {{- if and $pool.cache.claim $pool.cache.hostPath }}
    {{- fail (printf "the cache of pool %s has both a claim and a hostPath: remove one" $role) }}
  {{- end }}
{{- end }}
{{- if and $v.ingress.enabled (not $v.ingress.hosts) }}
  {{- fail "ingress.enabled is true but ingress.hosts is empty: name at least one host" }}
{{- end }}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) }}
  {{- fail "httpRoute.enabled is true but httpRoute.parentRefs is empty: name the Gateway" }}
{{- end }}
{{- range $key, $default := dict "first_byte_s" 120 "idle_s" 60 "unary_s" 3600 }}
  {{- $limit := get $limits $key | default $default }}
  {{- if and $v.ingress.enabled (lt ($v.ingress.readTimeoutSeconds | int64) (ceil $limit | int64)) }}
    {{- fail (printf "ingress.readTimeoutSeconds is %d, below config.limits.%s = %d, so the proxy would cut answers that the router still waits for: raise it" ($v.ingress.readTimeoutSeconds | int64) $key (ceil $limit | int64)) }}
  {{- end }}
{{- end }}
{{- end }}
