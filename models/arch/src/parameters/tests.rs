use super::slot::TARGET_MODULES;
use super::*;

#[test]
fn target_modules_are_listed_in_the_order_of_the_enum() {
    for (i, (target, module, slot)) in TARGET_MODULES.into_iter().enumerate() {
        assert_eq!(target as usize, i);
        assert_eq!(target.module(), module);
        assert_eq!(TargetModule::from_slot(slot), Some(target));
    }
}

#[test]
fn modules_are_named_once_each_and_unknown_ones_are_refused_with_the_known() {
    let names = ["v_proj", "q_proj", "v_proj"];
    assert_eq!(TargetModule::parse(&names), Ok(vec![TargetModule::Q, TargetModule::V]));
    let message = TargetModule::parse(&["lm_head"]).unwrap_err();
    assert!(message.contains("\"lm_head\"") && message.contains("q_proj, k_proj"), "{message}");
}
