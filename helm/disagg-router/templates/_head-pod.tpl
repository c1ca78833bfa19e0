{{/* The pod of Ray's head, the same for `plain` and `kuberay`. */}}
{{- define "dr.headPod" -}}
{{- $head := .Values.head -}}
metadata:
  labels:
    {{- include "dr.labels" (list . "head") | nindent 4 }}
    {{- with $head.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ toYaml .Values.config | sha256sum }}
    {{- with $head.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "dr.serviceAccount" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $head.terminationGracePeriodSeconds | int64 }}
  securityContext:
    {{- toYaml $head.podSecurityContext | nindent 4 }}
  {{- include "dr.pullSecrets" . | nindent 2 }}
  {{- include "dr.placement" $head | nindent 2 }}
  {{- with $head.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: head
      image: {{ include "dr.image" (list . $head.image "router") | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - bash
        - -ec
        - |
          ray start --head --node-ip-address="$POD_IP" --port=6379 --dashboard-host=0.0.0.0 --dashboard-port=8265 \
            --metrics-export-port=8080 --num-cpus=0 --num-gpus=0 --object-store-memory=100000000 "$@"
          exec disagg-router controller /etc/disagg-router/cluster.yaml --host {{ .Values.router.listenHost | quote }} --port 8100
        - head
        {{- with $head.extraRayArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        {{- include "dr.homeEnv" . | nindent 8 }}
        {{- include "dr.rayEnv" . | nindent 8 }}
        - {name: RAY_ADDRESS, value: "$(POD_IP):6379"}
        {{- if $head.mountCache }}
        - {name: HF_HOME, value: {{ .Values.poolDefaults.cache.mountPath }}/huggingface}
        {{- end }}
        {{- with $head.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $head.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: gcs, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: controller, containerPort: 8100}
        - {name: metrics, containerPort: 8080}
      startupProbe:
        httpGet: {path: /health, port: controller}
        {{- toYaml $head.startupProbe | nindent 8 }}
      livenessProbe:
        httpGet: {path: /health, port: controller}
        {{- toYaml $head.livenessProbe | nindent 8 }}
      readinessProbe:
        httpGet: {path: /health, port: controller}
        {{- toYaml $head.readinessProbe | nindent 8 }}
      resources:
        {{- toYaml $head.resources | nindent 8 }}
      securityContext:
        {{- toYaml $head.securityContext | nindent 8 }}
      volumeMounts:
        {{- include "dr.configMount" . | nindent 8 }}
        {{- include "dr.scratchMounts" . | nindent 8 }}
        - {name: shm, mountPath: /dev/shm}
        {{- if $head.mountCache }}
        - {name: cache, mountPath: {{ .Values.poolDefaults.cache.mountPath }}, readOnly: true}
        {{- end }}
        {{- with $head.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "dr.configVolume" . | nindent 4 }}
    {{- include "dr.scratchVolumes" . | nindent 4 }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $head.shmSize }}}}
    {{- if $head.mountCache }}
    {{- include "dr.cacheVolume" (list . .Values.poolDefaults.cache) | nindent 4 }}
    {{- end }}
    {{- with $head.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
