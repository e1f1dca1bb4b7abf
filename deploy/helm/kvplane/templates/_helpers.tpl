{{- define "kvplane.name" -}}
{{- if contains "kvplane" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-kvplane" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvplane.controlPlane" -}}{{ include "kvplane.name" . }}-control-plane{{- end }}
{{- define "kvplane.router" -}}{{ include "kvplane.name" . }}-router{{- end }}

{{- define "kvplane.selector" -}}
app.kubernetes.io/name: kvplane
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "kvplane.labels" -}}
{{ include "kvplane.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "kvplane.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "kvplane.controlPlaneSecret" -}}{{ .Values.tls.controlPlaneSecret | default (printf "%s-tls" (include "kvplane.controlPlane" .)) }}{{- end }}
{{- define "kvplane.routerSecret" -}}{{ .Values.tls.routerSecret | default (printf "%s-tls" (include "kvplane.router" .)) }}{{- end }}

{{- /* Where callers find all control planes: a name that resolves to each of them. */}}
{{- define "kvplane.planeName" -}}{{ include "kvplane.controlPlane" . }}-all.{{ .Release.Namespace }}.svc{{- end }}
{{- define "kvplane.plane" -}}dns:///{{ include "kvplane.planeName" . }}:{{ .Values.controlPlane.port }}{{- end }}

{{- define "kvplane.anyAddress" -}}{{ eq .Values.ipFamily "IPv6" | ternary "::" "0.0.0.0" }}{{- end }}
{{- define "kvplane.loopback" -}}{{ eq .Values.ipFamily "IPv6" | ternary "[::1]" "127.0.0.1" }}{{- end }}

{{- define "kvplane.storeUrl" -}}
{{- if eq .Values.controlPlane.store "memory" }}memory://
{{- else -}}
{{- $etcd := .Values.controlPlane.etcd -}}
{{- $query := list -}}
{{- if $etcd.tlsSecret }}{{ $query = append $query "ca=/etc/kvplane/etcd/ca.crt" }}{{ end -}}
{{- if and $etcd.tlsSecret $etcd.clientCertificate }}{{ $query = concat $query (list "cert=/etc/kvplane/etcd/tls.crt" "key=/etc/kvplane/etcd/tls.key") }}{{ end -}}
{{- if $etcd.user }}{{ $query = append $query (printf "password_file=/etc/kvplane/etcd-password/%s" $etcd.passwordSecret.key) }}{{ end -}}
etcd://{{ if $etcd.user }}{{ $etcd.user | urlquery | replace "+" "%20" }}@{{ end }}{{ join "," $etcd.endpoints }}{{ $etcd.prefix }}{{ if $query }}?{{ join "&" $query }}{{ end }}
{{- end }}
{{- end }}

{{- /* What the schema cannot say, each with what to do. */}}
{{- define "kvplane.check" -}}
{{- $v := .Values -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .Release.Name) }}{{ fail (printf "\n\nkvplane: the release is called %s, which cannot begin the name of a Service: begin with a letter, and take small letters, digits and - only" .Release.Name) }}{{ end -}}
{{- range $part := list "controlPlane" "router" }}
{{- if eq (int (index $v $part).port) (int (index $v $part).metricsPort) }}{{ fail (printf "\n\nkvplane: %s.port and %s.metricsPort are both %v: one pod cannot listen on it twice" $part $part (index $v $part).port) }}{{ end -}}
{{- end -}}
{{- if and $v.controlPlane.access.text $v.controlPlane.access.secret }}{{ fail "\n\nkvplane: controlPlane.access has text and secret: which of them says who may call? Give one" }}{{ end -}}
{{- if and $v.networkPolicy.enabled (not $v.engines.podLabels) }}{{ fail "\n\nkvplane: engines.podLabels is empty, so that networkPolicy would let in every pod: give labels that only engines have" }}{{ end -}}
{{- with $v.router.engines.kubernetes }}
{{- if and .prefill (eq .prefill .decode) }}{{ fail "\n\nkvplane: router.engines.kubernetes: prefill and decode select the same pods: give each a label of its own" }}{{ end -}}
{{- end -}}
{{- if and (eq $v.tls.source "none") (not $v.trustedNetwork) }}{{ fail "\n\nkvplane: anyone who reaches the control plane could read and claim KV locations: set tls.source to secret or cert-manager (and controlPlane.access), or trustedNetwork: true where every pod of the network may" }}{{ end -}}
{{- if and (ne $v.tls.source "none") (not (or $v.controlPlane.access.text $v.controlPlane.access.secret $v.tls.clientCertificates $v.trustedNetwork)) }}{{ fail "\n\nkvplane: with TLS alone anyone could still claim KV locations: give controlPlane.access, tls.clientCertificates: true, or trustedNetwork: true" }}{{ end -}}
{{- if and (eq $v.tls.source "secret") (not $v.tls.controlPlaneSecret) }}{{ fail "\n\nkvplane: tls.source is secret: name it in tls.controlPlaneSecret (tls.crt, tls.key, ca.crt)" }}{{ end -}}
{{- if and (eq $v.tls.source "cert-manager") (not $v.tls.issuer.name) }}{{ fail "\n\nkvplane: tls.source is cert-manager: name the issuer in tls.issuer.name" }}{{ end -}}
{{- if and $v.tls.clientCertificates (eq $v.tls.source "none") }}{{ fail "\n\nkvplane: tls.clientCertificates needs tls.source" }}{{ end -}}
{{- if and $v.router.enabled (eq $v.tls.source "secret") $v.tls.clientCertificates (not $v.tls.routerSecret) }}{{ fail "\n\nkvplane: tls.clientCertificates: the router needs one, too: name its secret in tls.routerSecret" }}{{ end -}}
{{- if and $v.router.token.secret (eq $v.tls.source "none") }}{{ fail "\n\nkvplane: router.token would be shown in clear: set tls.source" }}{{ end -}}
{{- if eq $v.controlPlane.store "memory" }}
{{- if or (ne (int $v.controlPlane.replicas) 1) $v.controlPlane.autoscaling.enabled }}{{ fail "\n\nkvplane: controlPlane.store is memory, which no two replicas share: set controlPlane.replicas: 1 and no autoscaling, or use etcd" }}{{ end -}}
{{- else if not $v.controlPlane.etcd.endpoints }}{{ fail "\n\nkvplane: controlPlane.etcd.endpoints is empty: name etcd's host:port, or set controlPlane.store: memory and controlPlane.replicas: 1" }}{{ end -}}
{{- if and $v.controlPlane.etcd.user (not $v.controlPlane.etcd.passwordSecret.name) }}{{ fail "\n\nkvplane: controlPlane.etcd.user needs controlPlane.etcd.passwordSecret.name" }}{{ end -}}
{{- if and $v.controlPlane.etcd.clientCertificate (not $v.controlPlane.etcd.tlsSecret) }}{{ fail "\n\nkvplane: controlPlane.etcd.clientCertificate needs controlPlane.etcd.tlsSecret" }}{{ end -}}
{{- if and $v.router.enabled (lt (int $v.router.drainGrace) 10) }}{{ fail (printf "\n\nkvplane: router.drainGrace: %d s are over before load balancers know that the pod goes (its readiness is asked for every 5 s, and counts after two answers): set 10 or more" (int $v.router.drainGrace)) }}{{ end -}}
{{- if and (eq $v.router.kind "DaemonSet") $v.router.autoscaling.enabled }}{{ fail "\n\nkvplane: router.kind is DaemonSet, which is not scaled: set router.autoscaling.enabled: false" }}{{ end -}}
{{- if and $v.router.ingress.enabled (not $v.router.ingress.host) }}{{ fail "\n\nkvplane: router.ingress.host is empty" }}{{ end -}}
{{- if and $v.router.gateway.enabled (not $v.router.gateway.name) }}{{ fail "\n\nkvplane: router.gateway.name is empty" }}{{ end -}}
{{- if hasKey $v.router.options "client-ca" }}{{ fail "\n\nkvplane: router.options: client-ca: the kubelet has no certificate for its probes, and would restart the router for ever: ask for clients' certificates at the ingress" }}{{ end -}}
{{- with $v.monitoring.tls }}
{{- if and .secret (not .serverName) }}{{ fail "\n\nkvplane: monitoring.tls.serverName is empty: Prometheus calls pods by their addresses, so it needs a name that is in the certificate" }}{{ end -}}
{{- if and .scraperSecret (not .secret) }}{{ fail "\n\nkvplane: monitoring.tls.scraperSecret needs monitoring.tls.secret" }}{{ end -}}
{{- end }}
{{- range $part := list "controlPlane" "router" }}
{{- $scaled := (index $v $part).autoscaling }}
{{- if and $scaled.enabled (gt (int $scaled.minReplicas) (int $scaled.maxReplicas)) }}{{ fail (printf "\n\nkvplane: %s.autoscaling: minReplicas is above maxReplicas" $part) }}{{ end -}}
{{- range $name, $value := (index $v $part).options }}
{{- if has (trimPrefix "no-" $name) (list "store" "grpc-host" "grpc-port" "grpc-tls-cert" "grpc-tls-key" "grpc-client-ca" "access" "host" "port" "plane" "plane-ca" "plane-cert" "plane-key" "plane-token-file" "tls-cert" "tls-key" "tenants" "tenant-limits" "workers" "metrics-host" "metrics-port" "metrics-tls-cert" "metrics-tls-key" "metrics-client-ca" "drain-grace" "drain-timeout" "allow-remote" "log-format") }}{{ fail (printf "\n\nkvplane: %s.options: %s is set by the chart, from another value" $part $name) }}{{ end -}}
{{- end }}{{ end -}}
{{- end }}

{{- define "kvplane.metricsArgs" -}}
{{- with .Values.monitoring.tls }}
{{- if .secret }}
- --metrics-tls-cert=/etc/kvplane/metrics/tls.crt
- --metrics-tls-key=/etc/kvplane/metrics/tls.key
{{- if .scraperSecret }}
- --metrics-client-ca=/etc/kvplane/metrics/ca.crt
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvplane.options" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $name }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%v" $name . | quote }}
{{- end }}
{{- else if kindIs "float64" $value }}
- {{ printf "--%s=%s" $name (toJson $value) | quote }}
{{- else }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvplane.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvplane.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "kvplane.spread" -}}
{{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "kvplane.selector" $ | nindent 6 }}
{{- end }}
{{- end }}

{{- define "kvplane.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
