-- Fails unless every table exists with the columns that the other statements name. Returns one row.
SELECT
  (SELECT count(*) FROM "{table}_fence" WHERE last >= 0) = 1,
  (SELECT count(name OR owner OR fence OR expires_at OR since OR host OR pid OR metadata OR permits OR permit_limit) FROM "{table}" WHERE false),
  (SELECT count(ticket OR owner OR name OR alive_until OR wake_port OR wake_id OR permits OR permit_limit) FROM "{table}_waiters" WHERE false);
