-- Releases the names that the owner holds on this node by any of its attempts, and notifies the waiters.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their metadata companions
-- ARGV    1  the owner token
--         2  for how many ms the names stay busy; 0: they are free at once
-- Answer  1 if the owner held every name, else 0; and 2 more for each connection that the message of one of the names has reached

local n, held, most = #KEYS / 3, 0, 0
for i = 1, n do
  local done, receivers = release_one(KEYS[i], KEYS[n + i], KEYS[n + n + i], ARGV[1], 'holdfast:free:', ARGV[2])
  most = math.max(most, receivers)
  if done then
    held = held + 1
  end
end
return (held == n and 1 or 0) + 2 * most
