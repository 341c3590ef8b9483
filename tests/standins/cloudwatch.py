"""Evaluates CloudWatch alarms. Moto stores the alarms and metrics, and this module decides which alarms fire.

Moto does not evaluate expressions. This module evaluates the few forms of metric math and Metrics Insights that our
alarms use, according to Amazon's documentation. It also models how a collector turns the data that it receives into
metrics. It does not prove that Amazon's service evaluates the alarms in the same way.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml
from types_boto3_cloudwatch import CloudWatchClient

Point = tuple[float, str, float, Mapping[str, str]]
"""A measurement: seconds since 1970, the metric's name, its value, and its attributes with those of the resource."""

INSIGHTS = re.compile(
    r'SELECT SUM\((\w+)\) FROM SCHEMA\("(\w+)", lease, "service\.name"\) '
    r"WHERE \"service\.name\" = '(\w+)' GROUP BY lease ORDER BY SUM\(\) DESC LIMIT 1"
)
CALCULATIONS: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Gt: operator.gt,
    ast.Eq: operator.eq,
}
BREACHES: dict[str, Callable[[float, float], bool]] = {
    "GreaterThanThreshold": operator.gt,
    "LessThanThreshold": operator.lt,
}
PUT_AT_ONCE = 1000


def template(text: str, parameters: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the alarms of a template with these parameters, in the form that `put_metric_alarm` expects."""

    class Loader(yaml.SafeLoader):
        """A loader that supports the two CloudFormation functions in the template."""

    Loader.add_constructor("!Ref", lambda _loader, node: {"Ref": node.value})
    Loader.add_constructor("!Sub", lambda _loader, node: {"Sub": node.value})
    document = yaml.load(text, Loader)  # noqa: S506  a SafeLoader
    values = {
        name: parameters.get(name, definition.get("Default")) for name, definition in document["Parameters"].items()
    }
    alarms: list[dict[str, Any]] = _substitute(
        [definition["Properties"] for definition in document["Resources"].values()], values
    )
    return alarms


def _substitute(node: Any, values: Mapping[str, Any]) -> Any:  # noqa: ANN401  whatever YAML holds
    match node:
        case {"Ref": name}:
            return values[name]
        case {"Sub": text}:
            return re.sub(r"\$\{(\w+)\}", lambda found: str(values[found[1]]), text)
        case dict():
            return {name: _substitute(child, values) for name, child in node.items()}
        case list():
            return [_substitute(child, values) for child in node]
        case _:
            return node


def collect(client: CloudWatchClient, exporter: Mapping[str, Any], points: Iterable[Point]) -> None:
    """Put these points as a collector's `awsemf` exporter with the settings `exporter` would put them."""
    data = [datum for point in points for datum in _make_metric_data(exporter["metric_declarations"], point)]
    for first in range(0, len(data), PUT_AT_ONCE):
        client.put_metric_data(Namespace=exporter["namespace"], MetricData=data[first : first + PUT_AT_ONCE])


def _make_metric_data(declarations: Sequence[Mapping[str, Any]], point: Point) -> Iterator[Any]:
    timestamp, name, value, attributes = point
    for declaration in declarations:
        if any(re.search(selector, name) for selector in declaration["metric_name_selectors"]):
            for dimension_names in declaration["dimensions"]:
                if attributes.keys() >= set(dimension_names):
                    dimensions = [
                        {"Name": dimension_name, "Value": attributes[dimension_name]}
                        for dimension_name in dimension_names
                    ]
                    utc_time = datetime.fromtimestamp(timestamp, UTC)
                    yield {"MetricName": name, "Dimensions": dimensions, "Timestamp": utc_time, "Value": value}


def in_alarm(client: CloudWatchClient, name: str, end: float) -> bool:
    """Return whether the alarm with this name is in the ALARM state at the time `end`, given the metrics so far."""
    (alarm,) = client.describe_alarms(AlarmNames=[name])["MetricAlarms"]
    evaluation = _AlarmEvaluation(client, alarm, end)
    breach = BREACHES[alarm["ComparisonOperator"]]
    breach_if_missing = {"breaching": True, "notBreaching": False}[alarm["TreatMissingData"]]
    breaches = [
        breach_if_missing if value is None else breach(value, alarm["Threshold"]) for value in evaluation.values()
    ]
    return sum(breaches) >= alarm.get("DatapointsToAlarm", alarm["EvaluationPeriods"])


Series = list[float | None]
"""A value for each period of the alarm, oldest first, or None if there is no data."""


class _AlarmEvaluation:
    """Computes the series by which one alarm is evaluated."""

    def __init__(self, client: CloudWatchClient, alarm: Any, end: float) -> None:  # noqa: ANN401  boto3's own dictionary
        self._client, self._alarm = client, alarm
        self._count, self._end = alarm["EvaluationPeriods"], datetime.fromtimestamp(end, UTC)

    def values(self) -> Series:
        """Return the values that are compared with the threshold."""
        alarm, series_by_id = self._alarm, dict[str, Series]()
        if "MetricName" in alarm:
            metric = {name: alarm[name] for name in ("Namespace", "MetricName", "Dimensions")}
            return self._statistic(metric, alarm["Period"], alarm["Statistic"])
        for query in alarm["Metrics"]:
            if "MetricStat" in query:
                stat_query = query["MetricStat"]
                series_by_id[query["Id"]] = self._statistic(
                    stat_query["Metric"], stat_query["Period"], stat_query["Stat"]
                )
            elif stat_query := INSIGHTS.fullmatch(query["Expression"]):
                series_by_id[query["Id"]] = self._most(stat_query[1], stat_query[2], stat_query[3], query["Period"])
            else:
                periods = {
                    metric_query["MetricStat"]["Period"]
                    for metric_query in alarm["Metrics"]
                    if "MetricStat" in metric_query
                }
                series_by_id[query["Id"]] = _evaluate_expression(query["Expression"], series_by_id, *periods)
        (returned_id,) = (query["Id"] for query in alarm["Metrics"] if query.get("ReturnData", True))
        return series_by_id[returned_id]

    def _statistic(self, metric: Any, period: int, stat: str) -> Series:  # noqa: ANN401  boto3's own dictionary
        start = self._end - timedelta(seconds=period * self._count)
        metric_stat: Any = {"Metric": metric, "Period": period, "Stat": stat}
        result = self._client.get_metric_data(
            MetricDataQueries=[{"Id": "m", "MetricStat": metric_stat}], StartTime=start, EndTime=self._end
        )["MetricDataResults"][0]
        values_by_time = dict(zip(result["Timestamps"], result["Values"], strict=True))
        return [values_by_time.get(start + timedelta(seconds=period * index)) for index in range(self._count)]

    def _most(self, name: str, namespace: str, application: str, period: int) -> Series:
        """Return the series of the lease whose sum is the greatest."""
        dimension: Any = {"Name": "service.name", "Value": application}
        metrics = self._client.list_metrics(Namespace=namespace, MetricName=name, Dimensions=[dimension])["Metrics"]
        all_series = [self._statistic(metric, period, "Sum") for metric in metrics]
        return max(all_series, key=lambda series: sum(value or 0 for value in series), default=[None] * self._count)


def _evaluate_expression(expression: str, series_by_id: Mapping[str, Series], period: int) -> Series:
    tree = ast.parse(expression.replace(" AND ", " and "), mode="eval").body
    count = len(next(iter(series_by_id.values())))
    return [_evaluate_node(tree, series_by_id, index, period) for index in range(count)]


def _evaluate_node(node: ast.AST, series_by_id: Mapping[str, Series], index: int, period: int) -> float | None:
    match node:
        case ast.Constant(int() | float() as number):
            return float(number)
        case ast.Name(name):
            return series_by_id[name][index]
        case ast.Call(ast.Name("RATE"), [ast.Name(name)]):
            current, previous = series_by_id[name][index], series_by_id[name][index - 1] if index else None
            return None if current is None or previous is None else (current - previous) / period
        case ast.Call(ast.Name("IF"), parts) | ast.BoolOp(ast.And(), parts):
            operands = [_evaluate_node(part, series_by_id, index, period) for part in parts]
            if None in operands:
                return None
            return (operands[1] if operands[0] else operands[2]) if isinstance(node, ast.Call) else float(all(operands))
        case ast.BinOp(left, sign, right) | ast.Compare(left, [sign], [right]):
            left_value, right_value = (
                _evaluate_node(left, series_by_id, index, period),
                _evaluate_node(right, series_by_id, index, period),
            )
            return (
                None
                if left_value is None or right_value is None
                else float(CALCULATIONS[type(sign)](left_value, right_value))
            )
        case _:
            raise ValueError(f"metric math: {ast.unparse(node)} is not worked out here")
