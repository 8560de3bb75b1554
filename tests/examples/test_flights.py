"""The flights' CSV files as a database: local times become UTC, and delays are known once they have happened."""

import numpy as np
import pytest

from dejax.datasets import NEVER
from examples import flights

pytest.importorskip("pyarrow")

FILES = {
    "flights": "time_hour,sched_dep_time,sched_arr_time,dep_delay,arr_delay,air_time,distance,carrier,tailnum,origin,"
    "dest\n"
    "2013-01-02T04:00:00Z,2359,258,5,40,200,1000,UA,N1,EWR,DEN\n"  # lands at 9:58 UTC, 40 minutes late
    "2013-09-11T10:00:00Z,630,900,NA,NA,NA,700,UA,NA,EWR,SJU\n"  # cancelled; SJU is not among the airports
    "2013-02-02T11:00:00Z,600,830,0,-5,100,700,UA,N2,EWR,DEN\n"
    "2013-11-11T11:00:00Z,600,830,0,-5,100,700,UA,N2,EWR,DEN\n",
    "planes": "tailnum,year,type,manufacturer,model,engines,seats,speed,engine\nN1,2004,a,b,c,2,55,NA,d\n",
    "airlines": "carrier,name\nUA,United\n",
    "airports": "faa,name,lat,lon,alt,tz,dst,tzone\nEWR,Newark,1,2,3,-5,A,America/New_York\n"
    "DEN,Denver,4,5,6,-7,A,America/Denver\n",
    "weather": "origin,time_hour,temp,dewp,humid,wind_dir,wind_speed,wind_gust,precip,pressure,visib\n"
    "EWR,2013-01-02T03:00:00Z,1,2,3,4,5,NA,0,1,1\n",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / f"{name}.csv").write_text(text)
    return tmp_path


def test_flights_become_rows_in_utc_with_delays_that_are_known_later(folder):
    found = flights.read_tables(folder)["flights"]
    assert found["sched_dep"][0] == np.datetime64("2013-01-02T04:59") and found["asked_at"][0] == np.datetime64(
        "2013-01-02T02:59"
    )
    assert found["sched_arr"][0] == np.datetime64("2013-01-02T09:58")  # 2:58 of the next morning in Denver
    assert found["sched_arr"][1] == np.datetime64("2013-09-11T13:00")  # Puerto Rico keeps one time
    data = flights.database(folder)
    delay = data.columns["flights"]["arr_delay"]
    landed = np.datetime64("2013-01-02T10:38", "s").astype(np.int64)
    assert delay.known_at.tolist()[:2] == [landed, NEVER]
    assert data.num_nodes["planes"] == 2 and data.num_nodes["airports"] == 3
    assert len(data.edges["flights", "tailnum@arr_time", "planes"][0]) == 3
    task = data.tasks["late"]
    assert task.labels.tolist() == [1, 0, 0] and {split: len(places) for split, places in task.splits.items()} == {
        "train": 2, "valid": 0, "test": 1,
    }  # fmt: skip
