-- Releases a name on this node, no matter which owner holds it, and notifies waiters.
--
-- KEYS    1  the lock key
--         2  its fence companion
--         3  its metadata companion
-- Answer  1 if the name was held, else 0

return release_one(KEYS[1], KEYS[2], KEYS[3], nil, 'holdfast:free:', '0') and 1 or 0
